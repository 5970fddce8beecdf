"""Write the tables of metrics in the documentation from their declaration, megatron_wrap/metrics/declared.py.

python scripts/metric_docs.py            between the markers `metrics: begin` and `metrics: end` of each page
python scripts/metric_docs.py --check    writes nothing; exits 1 where a page differs
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from _generated import write_or_check

from megatron_wrap.metrics.declared import METRICS, MetricInfo

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- metrics: begin -->", "<!-- metrics: end -->"


@dataclass(frozen=True)
class Language:
    """The texts of a page's table."""

    header: tuple[str, str, str, str]
    meanings: Mapping[str, str]
    """Metric -> its meaning."""
    condition: str
    """Text that is appended to the meaning of a metric that the configuration adds; `{key}` is the dotted key."""


ENGLISH = Language(
    header=("name", "unit", "on the console", "meaning"),
    meanings={info.name: info.meaning for info in METRICS},
    condition=" (added by `{key}`)",
)

_AUXILIARY_LOSS = "；不乘系数，不计入 `loss`"
CHINESE = Language(
    header=("名称", "单位", "控制台显示", "含义"),
    meanings={
        "iteration": "训练开始以来已走的步数",
        "loss": "本步更新之前的目标函数值",
        "METRIC": "flow 自己的指标，例如 `gpt_sft` 的 `truncated_samples`",
        "eval/NAME/loss": "评估集 NAME 上的目标函数值",
        "eval/NAME/perplexity": "评估集 NAME 上损失的 exp（损失大于 20 时取 exp(20)，与 Megatron-LM 一致）；"
        "仅限目标为每词元平均负对数似然的 flow（`reports_perplexity`）",
        "eval/NAME/METRIC": "flow 自己的指标 METRIC 在评估集 NAME 上的值",
        "load_balancing_loss": f"专家路由器在每个 micro-batch 上的辅助损失（`aux_loss`）{_AUXILIARY_LOSS}",
        "seq_load_balancing_loss": f"同上，在每个序列上（`seq_aux_loss`）{_AUXILIARY_LOSS}",
        "global_load_balancing_loss": f"同上，在本步至此的所有 micro-batch 上（`global_aux_loss`）{_AUXILIARY_LOSS}",
        "z_loss": f"路由器 logits 的 logsumexp 的均方{_AUXILIARY_LOSS}",
        "experts/LAYER/busiest": "某一层（如 layer_3，从 0 数起）最忙的专家处理的 token 数与该层专家平均数之比",
        "experts/LAYER/entropy": "一个 token 的路由分数在该层全部专家上的熵的平均值",
        "experts/LAYER/dropped": "被丢弃的专家选择数（moe_expert_capacity_factor）",
        "grad_norm": "裁剪之前整个梯度的范数",
        "params_norm": "更新之后全部参数的范数",
        "num_zeros_in_grad": "整个梯度中为零的元素个数",
        "learning_rate": "本步的学习率",
        "loss_scale": "用于 fp16；其他精度为 1",
        "elapsed_time": "本步用时",
        "tokens_per_second": "所有设备合计，不含填充",
        "tokens_per_second_per_device": "同上，除以设备数",
        "tflops": "每设备完成本步所需矩阵乘法的速度；冻结的权重没有梯度，不计其计算量",
        "throughput": "与 `tflops` 相同",
        "memory_allocated": "本进程所用设备上已分配的内存；在 CPU 上为进程的常驻内存",
        "memory_reserved": "同上，另含 torch 分配器留作复用的部分",
        "memory_max": "`memory_allocated` 的峰值",
        "global_batch_size": "本步的样本数",
        "consumed_samples": "训练开始以来的累计",
        "consumed_tokens": "训练开始以来的累计，不含填充",
        "num_tokens": "与 `consumed_tokens` 相同，trl 的名称；trl 还计入每个序列的最后一个 token（这里只作标签）",
        "skipped_iterations": "训练开始以来没有更新的步数：权重为零、fp16 溢出，或计入 `bad_steps`",
        "bad_steps": "因损失或梯度非有限值、或损失突增而跳过或回退的累计步数（`megatron_wrap.bad_steps`）",
        "skipped_samples": "训练开始以来因无法使用而略过的数据行数（`megatron_wrap.data.on_bad_sample: skip`）",
    },
    condition="（由 `{key}` 添加）",
)

PAGES = {"docs/metrics.md": ENGLISH, "docs/metrics-zh.md": CHINESE}


def table(language: Language) -> str:
    """The Markdown table of all metrics."""
    rows = [language.header, ("---",) * len(language.header), *(_row(info, language) for info in METRICS)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(info: MetricInfo, language: Language) -> tuple[str, ...]:
    name = info.name.removeprefix("eval/NAME/")
    console = "" if info.console is None else f"`{info.console.render(name, info.console.example)}`"
    condition = "" if info.config_key is None else language.condition.format(key=info.config_key)
    return f"`{info.name}`", info.unit, console, language.meanings[info.name] + condition


def with_table(page: str, language: Language) -> str:
    """The page's text with the table between its markers.

    Raises:
        ValueError: the page has not exactly one pair of markers.
    """
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"expected one line {BEGIN} and, below it, one line {END}")
    return f"{before}{begin}{table(language)}{end}{after}"


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Write or check the pages below `root`; returns the exit status."""
    pages = {name: with_table((root / name).read_text(encoding="utf-8"), language) for name, language in PAGES.items()}
    message = "the tables of metrics differ in {}; run python scripts/metric_docs.py"
    return write_or_check(pages, root, __doc__ or "", message, arguments)


if __name__ == "__main__":
    sys.exit(main())
