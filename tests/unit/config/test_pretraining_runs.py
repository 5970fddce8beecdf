"""The runs of configs/pretraining: every row of the tables in docs/pretraining.md holds, without a GPU."""

import math
import re
from pathlib import Path

import pytest

from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.config import RunConfig, load_run_config
from megatron_wrap.config.checks.layout import check_layout
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.schema import derived

ROOT = Path(__file__).parents[3]
PARALLEL, RUNS = "megatron_lm.model.parallel", ROOT / "configs/pretraining"
AXES = ("DP", "TP", "PP", "VPP", "CP", "EP")


def table(first: str) -> list[dict[str, str]]:
    """The table of docs/pretraining.md whose first column is `first`; an empty cell repeats the one above."""
    text = (ROOT / "docs/pretraining.md").read_text("utf-8")
    lines = re.search(rf"^\| {first} \|.*\n\|[ -|]+\n((?:\|.*\n)+)", text, re.M)
    head = re.search(rf"^\| {first} \|.*", text, re.M)
    assert lines is not None
    assert head is not None
    names = [name.strip() for name in head[0].strip("|").split("|")]
    rows: list[dict[str, str]] = []
    for line in lines[1].splitlines():
        cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        above = rows[-1] if rows and not cells[0] else {}
        rows.append({name: cell or above.get(name, "") for name, cell in zip(names, cells, strict=True)})
    return rows


LAYOUTS, SCHEDULES = table("model"), table("run")


def read(run: str, *overrides: str) -> RunConfig:
    return load_run_config(str(RUNS / f"{run}.yaml"), overrides)


def tokens(text: str) -> float:
    """`375M tokens` as a number."""
    number, unit = re.match(r"([\d.]+)([MGT])", text).groups()  # type: ignore[union-attr]
    return float(number) * {"M": 1e6, "G": 1e9, "T": 1e12}[unit]


def test_the_tables_name_every_run_and_each_run_selects_its_first_layout():
    runs = sorted(path.stem for path in RUNS.glob("*.yaml"))
    assert sorted({row["run"] for row in LAYOUTS}) == sorted(row["run"] for row in SCHEDULES) == runs
    for run in runs:
        first = next(row["layout"] for row in LAYOUTS if row["run"] == run)
        assert f"    parallel:\n      __select__: {first}\n" in (RUNS / f"{run}.yaml").read_text("utf-8")


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: f"{row['run']}-{row['layout']}-{row['GPUs']}")
def test_a_layout_fits_its_gpus(row):
    config = read(row["run"], f"{PARALLEL}.__select__={row['layout']}")
    check_values(config)
    parallel = config.parallel
    actual = {
        "DP": check_layout(config, int(row["GPUs"])),  # every batch of the ramp-up divides
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "VPP": derived.virtual_pipeline_size(config) or 1,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
    }
    assert actual == {axis: int(row[axis]) for axis in AXES}
    assert derived.sequence_parallel(parallel) == (actual["TP"] > 1)
    assert sum(derived.layers_per_stage(config)) == config.arch.num_layers
    arch = config.arch
    tp, cp = actual["TP"], actual["CP"]
    assert arch.num_attention_heads % tp == derived.num_query_groups(arch) % tp == 0
    assert config.train.seq_length % math.lcm(tp, 2 * cp) == 0
    assert (arch.num_experts or actual["EP"]) % actual["EP"] == 0


@pytest.mark.parametrize("run", [row["run"] for row in SCHEDULES])
def test_the_parameters_are_as_many_as_published(run):
    """Counted over the tensors of a Hugging Face folder of the model, without padding of the vocabulary."""
    config = read(run)
    exported = export_format(config)
    count = sum(math.prod(shape) for shape in exported.family.shapes(exported.arch).values())
    published = next(row["parameters"] for row in LAYOUTS if row["run"] == run)
    decimals = len(published.partition(".")[2].rstrip("MB"))
    assert f"{count / {'M': 1e6, 'B': 1e9}[published[-1]]:.{decimals}f}{published[-1]}" == published


@pytest.mark.parametrize("row", SCHEDULES, ids=lambda row: row["run"])
def test_the_schedule_is_that_of_the_table(row):
    """In tokens where the source gives tokens, to within a batch; the ramp-up counts."""
    config = read(row["run"])
    rate, train = config.learning_rate, config.train
    a_batch = train.global_batch_size * train.seq_length

    def is_reached(iterations: float, wanted: float) -> bool:
        return abs(derived.samples_of_iterations(config, iterations) * train.seq_length - wanted) <= a_batch

    assert f"{a_batch / 1e6:.1f}M" == row["global batch, tokens"]
    assert rate.lr == float(row["peak learning rate"])
    warmup, decay = derived.lr_warmup_iters(config), derived.lr_decay_iters(config)
    if "steps" in row["warm-up"]:
        assert warmup == int(row["warm-up"].removesuffix(" steps").replace(",", ""))
    else:
        assert is_reached(warmup, tokens(row["warm-up"]))
    if row["ramp-up"]:
        assert train.rampup_batch_size is not None
        assert train.rampup_batch_size[2] * train.seq_length == pytest.approx(tokens(row["ramp-up"]), rel=1e-6)
    kind, _, length = row["decay"].rpartition(" over ")
    assert rate.min_lr == pytest.approx(rate.lr / (100 if "hundredth" in kind else 10))
    if rate.lr_decay_style == "WSD":
        assert rate.lr_wsd_decay_iters is not None
        assert is_reached(decay - rate.lr_wsd_decay_iters, tokens("10T"))
        assert is_reached(decay, tokens("10T") + tokens(length))
    elif "steps" in length:
        assert decay == int(length.removesuffix(" steps").replace(",", ""))
    else:
        assert is_reached(decay, tokens(length))


def test_gpt3_s_runs_have_the_precision_and_the_optimizer_of_their_sources():
    """Brown et al., appendix B: 300 billion tokens, betas, clipping, weight decay; Megatron-LM's example: the rest."""
    for run in ("gpt3-125m", "gpt3-1.3b", "gpt3-13b", "gpt3-175b", "gpt3-175b-tutorial"):
        config = read(run)
        optimizer = config.optimizer
        assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.95, 1e-8)
        assert (optimizer.clip_grad, optimizer.weight_decay, config.arch.init_method_std) == (1.0, 0.1, 0.006)
        assert (config.dtype.fp16, config.data.split) == (True, "949,50,1")
        seen = derived.samples_of_iterations(config, derived.train_iters(config)) * 2048
        if run == "gpt3-175b-tutorial":
            assert derived.train_iters(config) == 500_000
        else:
            assert abs(seen - 300e9) <= config.train.global_batch_size * 2048
