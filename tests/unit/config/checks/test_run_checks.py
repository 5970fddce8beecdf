"""Contradictions: the exact refusal of each, and agreement with what Megatron-Core's own classes accept."""

import dataclasses
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from _messages import assert_facts

from megatron_wrap import errors
from megatron_wrap.config import RunConfig, load_run_config
from megatron_wrap.config.checks.layout import check_layout
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.schema import derived
from megatron_wrap.core.validation.paths import check_run
from megatron_wrap.errors import CheckpointError, ConfigError, DataError, LayoutError, MegatronWrapError
from megatron_wrap.platform import choose_platform

choose_platform("cpu").install()

from megatron.core import num_microbatches_calculator  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
Write = Callable[..., str]
LM = {
    "adapter": "megatron_wrap.adapter",
    "arch": "megatron_lm.model.arch",
    "parallel": "megatron_lm.model.parallel",
    "train": "megatron_lm.train.common",
    "rate": "megatron_lm.train.learning-rate",
    "optimizer": "megatron_lm.train.optimizer",
    "dtype": "megatron_lm.train.dtype",
    "recompute": "megatron_lm.train.recompute",
    "ddp": "megatron_lm.misc.ddp",
    "data": "megatron_wrap.data",
    "logger": "megatron_wrap.logger",
    "checkpoint": "megatron_wrap.checkpoint",
    "profile": "megatron_wrap.profile",
    "init": "megatron_wrap.init",
    "flow": "megatron_wrap.flow",
    "provider": "megatron_wrap.model_provider",
}
REFUSALS = yaml.safe_load(Path(__file__).with_name("refusals.yml").read_text("utf-8"))


def load(run: str, *short: str) -> RunConfig:
    """Overrides with the section's short name: load(run, "train.seed=1")."""
    return load_run_config(run, [f"{LM[text.partition('.')[0]]}.{text.partition('.')[2]}" for text in short])


def refusal(error: type[MegatronWrapError], check: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(error) as raised:
        check(*arguments)
    return str(raised.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_contradict_nothing(path: Path) -> None:
    config = load_run_config(path)
    check_values(config)
    replicas = 2 if path.stem == "tiny-mixtral-sft" else 1  # its experts take their processes out of these
    assert check_layout(config, derived.processes_needed(config)) == replicas
    assert derived.processes_needed(config) == {"tiny-llama-mock": 1}.get(
        path.stem, 2 if path.stem.startswith("tiny") else 8
    )


@pytest.mark.parametrize("case", REFUSALS["alone"], ids=[case["override"] for case in REFUSALS["alone"]])
def test_what_is_refused(write_run: Write, case: dict[str, str]) -> None:
    config, error, message = load(write_run(), case["override"]), getattr(errors, case["error"]), case["message"]
    short, _, rest = message.partition(".")
    assert_facts(refusal(error, check_values, config), f"{LM[short]}.{rest}")
    assert type(refusal_error(config)) is error


def refusal_error(config: RunConfig) -> MegatronWrapError:
    try:
        check_values(config)
    except MegatronWrapError as error:
        return error
    raise AssertionError("nothing was refused")


TOO_DEEP = {
    "overrides": ["arch.num_experts=4", "arch.moe_layer_freq=" + "(" * 5000],
    "message": "is no list of 0 and 1",
}


@pytest.mark.parametrize("case", [*REFUSALS["together"], TOO_DEEP], ids=lambda case: case["message"])
def test_what_is_refused_together(write_run: Write, case: dict[str, Any]) -> None:
    message = refusal(MegatronWrapError, check_values, load(write_run(), *case["overrides"]))
    assert_facts(message, f": {case['message']}")


ON_RUNS = [(group, row) for group in REFUSALS["on_runs"] for row in group["rows"]]


@pytest.mark.parametrize(("group", "row"), ON_RUNS, ids=str)
def test_what_is_refused_on_other_runs(write_run: Write, group: dict[str, Any], row: list[Any]) -> None:
    """By the reader or by the checks."""
    overrides, *facts = row
    texts = [group.get("prefix", "") + text for text in ([overrides] if isinstance(overrides, str) else overrides)]
    run = CONFIGS.parent / group["run"] if "run" in group else write_run()
    message = refusal(MegatronWrapError, lambda: check_values(load_run_config(run, texts)))
    assert not group.get("located") or message.startswith(f"command line {texts[0].partition('=')[0]}: ")
    assert all(fact in message for fact in facts), message


KTO = "flow.__select__=gpt_kto data.__select__=none arch.vocab_size=60"


@pytest.mark.parametrize(
    "overrides",
    [
        "arch.num_attention_heads=7 arch.kv_channels=32 arch.num_query_groups=7",
        "parallel.tensor_model_parallel_size=2 parallel.sequence_parallel=true",
        "parallel.pipeline_model_parallel_size=2 parallel.num_layers_per_virtual_pipeline_stage=1",
        "parallel.virtual_pipeline_model_parallel_size=1",
        "optimizer.weight_decay_incr_style=cosine optimizer.end_weight_decay=0.1",
        "optimizer.use_distributed_optimizer=true ddp.overlap_grad_reduce=true ddp.overlap_param_gather=true",
        "recompute.__select__=full",
        "recompute.__select__=selective recompute.recompute_modules=[mlp]",
        "rate.lr_decay_style=WSD rate.lr_wsd_decay_iters=4",
        "dtype.__select__=fp16 dtype.loss_scale=128",
        "arch.num_experts=4 parallel.expert_model_parallel_size=2",
        "arch.num_experts=4 arch.moe_layer_freq='[0]+3*[1]'",
        "arch.num_experts=4 arch.ffn_hidden_size=511 arch.moe_ffn_hidden_size=64 parallel.tensor_model_parallel_size=2",
        "arch.vocab_size=null data.tokenizer=folder",
        "train.sample_prompts=[It,Once] data.tokenizer=folder",
        'train.sample_prompts=[[{"role":"user","content":"Hello"}],Once] data.tokenizer=folder',
        f"{KTO} train.micro_batch_size=1 train.global_batch_size=1 flow.loss_type=apo_zero_unpaired",
        "train.eval_interval=5",  # the caller gives wrap.evaluate its samples
    ],
)
def test_what_is_accepted(write_run: Write, overrides: str) -> None:
    check_values(load(write_run(), *overrides.split()))


def splits() -> Iterator[tuple[int, int, int | None, int | None, int | None]]:
    ends = (None, 1, 2, 3, 4)
    for stages, layers, first, last, chunks in itertools.product((2, 3, 4), (4, 6, 7, 8), ends, ends, (None, 2)):
        if first is not None or last is not None:
            yield stages, layers, first, last, chunks


def test_uneven_pipelines_are_those_that_megatron_accepts(write_run: Write) -> None:
    config = load(write_run())
    accepted = 0
    for stages, layers, first, last, chunks in splits():
        parallel = dataclasses.replace(
            config.parallel,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=chunks,
            decoder_first_pipeline_num_layers=first,
            decoder_last_pipeline_num_layers=last,
        )
        ours = dataclasses.replace(config, parallel=parallel, arch=dataclasses.replace(config.arch, num_layers=layers))
        try:
            TransformerConfig(
                num_layers=layers,
                hidden_size=8,
                num_attention_heads=1,
                pipeline_model_parallel_size=stages,
                pipeline_dtype=object(),
                virtual_pipeline_model_parallel_size=chunks,
                num_layers_in_first_pipeline_stage=first,
                num_layers_in_last_pipeline_stage=last,
            )
        except ValueError:
            with pytest.raises(LayoutError):
                check_values(ours)
            continue
        if (first or 0) + (last or 0) > layers:  # Megatron-Core lets a negative rest of layers pass here
            assert_facts(refusal(LayoutError, check_values, ours), "leave -")
            continue
        check_values(ours)
        assert sum(derived.layers_per_stage(ours)) == layers
        assert len(derived.layers_per_stage(ours)) == stages
        accepted += 1
    assert accepted > 20


class _Groups:
    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
@pytest.mark.parametrize("warmup", [0, 4, 9, 10, 12])
@pytest.mark.parametrize(("start", "end"), [(0.0, 0.1), (0.1, 0.1), (0.2, 0.1)])
def test_schedules_are_those_that_megatron_accepts(
    write_run: Write, style: str, warmup: int, start: float, end: float
) -> None:
    config = load(
        write_run(),
        f"rate.lr_decay_style={style}",
        f"rate.lr_warmup_iters={warmup}",
        f"rate.lr_wsd_decay_iters={3 if style == 'WSD' else 'null'}",
        f"optimizer.start_weight_decay={start}",
        f"optimizer.end_weight_decay={end}",
        f"optimizer.weight_decay_incr_style={'constant' if start == end else 'linear'}",
    )
    try:
        OptimizerParamScheduler(
            _Groups(), 0.0, 2e-4, 0.0, warmup, 10, style, start, end, 10, "linear", wsd_decay_steps=3
        )
    except AssertionError:
        with pytest.raises(ConfigError):
            check_values(config)
    else:
        check_values(config)


def test_the_ramp_up_is_that_of_megatron(write_run: Write) -> None:
    config = load(write_run(), "train.global_batch_size=24", "train.rampup_batch_size=[4, 4, 100]")
    check_values(config)
    assert derived.global_batch_sizes(config) == [4, 8, 12, 16, 20, 24]
    sizes = [derived.global_batch_size_at(config, consumed) for consumed in (0, 19, 20, 59, 60, 99, 100, 101)]
    assert sizes == [4, 4, 8, 12, 16, 20, 24, 24]
    calculator = getattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator", None)
    if calculator is not None:  # 0.19 has none
        theirs = calculator(24, 2, 1, False, 0, 4, 4, 100)
        for consumed in range(121):
            theirs.update(consumed, True)
            ours = derived.global_batch_size_at(config, consumed)
            assert ours == theirs.current_global_batch_size
            assert derived.num_microbatches(config, 1, ours) == theirs.num_micro_batches


TP2, CP2, PP2 = (f"parallel.{axis}_parallel_size=2" for axis in ("tensor_model", "context", "pipeline_model"))
BATCH = "train.common.global_batch_size"


@pytest.mark.parametrize(
    ("overrides", "replicas"),
    [
        ([TP2, CP2], {4: 1, 16: 4}),
        (["train.rampup_batch_size=[2, 2, 100]"], {1: 1}),
        (["arch.num_experts=4", "parallel.expert_model_parallel_size=4"], {4: 4}),
    ],
)
def test_the_replicas_of_a_layout(write_run: Write, overrides: list[str], replicas: dict[int, int]) -> None:
    config = load(write_run(), *overrides)
    assert {processes: check_layout(config, processes) for processes in replicas} == replicas


@pytest.mark.parametrize(
    ("overrides", "processes", "facts"),
    [
        ([TP2, CP2], 6, "6 processes: 4 megatron_lm.model.parallel"),
        ([TP2, CP2], 12, f"run.yaml:12 megatron_lm.{BATCH}: 8 2 3 (12 4) 6 12"),
        (["train.rampup_batch_size=[2, 2, 100]"], 2, "megatron_lm.train.common.rampup_batch_size: 2 (2 1) 4"),
        (
            [PP2, "parallel.virtual_pipeline_model_parallel_size=2", "train.global_batch_size=6"],
            2,
            f"command line megatron_lm.{BATCH}: 2 6 3 4 8",
        ),
        (
            ["arch.num_experts=4", "parallel.expert_model_parallel_size=4"],
            2,
            "2 processes: 4 megatron_lm.model.parallel.expert_model_parallel_size",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_its_sizes(
    write_run: Write, overrides: list[str], processes: int, facts: str
) -> None:
    assert_facts(refusal(LayoutError, check_layout, load(write_run(), *overrides), processes), facts)


def test_a_program_under_plain_python_is_answered_with_its_launch_command(
    write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(write_run(), "parallel.tensor_model_parallel_size=2")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["my run.py", "a=b"])
    command = "`torchrun --nproc-per-node 2 'my run.py' a=b`"
    assert command in refusal(LayoutError, check_layout, config, 1)
    monkeypatch.setattr(sys, "argv", ["/bin/megatron-wrap", "train"])
    assert "torchrun" not in refusal(LayoutError, check_layout, config, 1)


def test_numbers_that_follow(write_run: Write) -> None:
    config = load(write_run(), "rate.lr_warmup_fraction=0.25", "arch.ffn_hidden_size=null", "arch.hidden_size=4096")
    assert derived.lr_warmup_iters(config) == 2.5
    assert derived.ffn_hidden_size(config.arch) == 10880  # Megatron-LM's int((4 * 4096 * 2 / 3) / 64) * 64
    assert derived.ffn_hidden_size(dataclasses.replace(config.arch, swiglu=False)) == 4 * 4096
    assert derived.kv_channels(config.arch) == 512
    interleaved = load(
        write_run(), "parallel.pipeline_model_parallel_size=2", "parallel.num_layers_per_virtual_pipeline_stage=1"
    )
    assert derived.virtual_pipeline_size(interleaved) == 2


# ---- files and folders


def jsonl_run(write_run: Write, *more: str) -> RunConfig:
    return load(write_run(), "data.__select__=jsonl", "data.train=data/train.jsonl", *more)


def test_a_missing_file_or_folder_names_the_nearest(write_run: Write, tmp_path: Path) -> None:
    here = f"(relative to the working directory {tmp_path})"
    data, start = jsonl_run(write_run), "command line megatron_wrap.data.train: 'data/train.jsonl'"
    assert_facts(refusal(DataError, check_run, data), f"{start} {here}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "trian.jsonl").touch()
    assert_facts(refusal(DataError, check_run, data), f"{start} did you mean data/trian.jsonl? {here}")
    (tmp_path / "data" / "train.jsonl").mkdir()
    assert "folder 'data/train.jsonl' is empty" in refusal(DataError, check_run, data)
    (tmp_path / "tokenizer").mkdir()
    message = refusal(ConfigError, check_run, load(write_run(), "data.tokenizer=tokeniser"))
    assert_facts(message, f"command line megatron_wrap.data.tokenizer: 'tokeniser' did you mean tokenizer? {here}")
    message = refusal(CheckpointError, check_run, load(write_run(), "train.load=ckpt/x"))
    assert_facts(message, f"command line megatron_lm.train.common.load: 'ckpt/x' {here}")


@pytest.mark.parametrize("key", ["train.save", "logger.output_dir"])
def test_an_output_folder_that_cannot_be_written(write_run: Write, tmp_path: Path, key: str) -> None:
    (tmp_path / "file").touch()
    section, name = key.split(".")
    start = f"command line {LM[section]}.{name}: "
    message = refusal(ConfigError, check_run, load(write_run(), f"{key}=file/out"))
    assert_facts(message, f"{start}'file/out' {tmp_path}/file")
    owner = os.geteuid()
    with tempfile.TemporaryDirectory() as closed:  # not below tmp_path, which another user cannot enter
        Path(closed).chmod(0o555)
        config = load(write_run(), f"{key}={closed}/out/put")
        try:
            if owner == 0:  # root may write everywhere
                os.seteuid(65534)
            message = refusal(ConfigError, check_run, config)
        finally:
            os.seteuid(owner)
        assert os.listdir(closed) == []
    assert_facts(message, f"{start}'{closed}/out/put' {closed}")


def test_a_check_writes_nothing(write_run: Write, tmp_path: Path) -> None:
    check_run(load(write_run(), "train.save=deep/down/ckpt"))
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_the_steps_of_a_number_of_samples_are_those_of_megatron(write_run: Write) -> None:
    """`update_train_iters` of Megatron-LM (megatron/training/training.py), with Megatron-Core's own calculator."""
    calculator = getattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator", None)
    for samples, ramp in ((1000, None), (1007, (4, 4, 100)), (90, (4, 4, 100)), (500, (8, 16, 33))):
        overrides = ["train.train_iters=null", f"train.train_samples={samples}", "train.global_batch_size=24"]
        config = load(write_run(), *overrides, f"train.rampup_batch_size={'null' if ramp is None else list(ramp)}")
        check_values(config)
        consumed = iterations = 0
        if ramp is not None and calculator is not None:  # 0.19 has none
            theirs = calculator(24, 2, 1, False, 0, *ramp)
            while consumed <= ramp[2] and consumed <= samples:
                theirs.update(consumed, False)
                consumed += theirs.current_global_batch_size
                iterations += 1
        if ramp is None or calculator is not None:
            assert derived.train_iters(config) == iterations + max(0, samples - consumed) // 24
        assert (derived.lr_decay_samples(config), derived.lr_warmup_samples(config)) == (samples, 0)
