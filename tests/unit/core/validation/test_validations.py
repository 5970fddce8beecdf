"""The order in which a run's mistakes are reported, before any process starts."""

from pathlib import Path

import pytest

from megatron_wrap.config import load_run_config
from megatron_wrap.core import MegatronWrap
from megatron_wrap.core.validation import validate
from megatron_wrap.errors import CheckpointError, ConfigError, DataError, FlowError, LayoutError, MegatronWrapError

TRAIN, DATA = "megatron_lm.train.common", "megatron_wrap.data"
DATA_FILES = (f"{DATA}.__select__=jsonl", f"{DATA}.train=train.jsonl")


def test_mistakes_are_reported_in_one_order(tmp_path: Path) -> None:
    """Values, the layout, data, the checkpoint to start from, the reference model, the flow; nothing is written."""
    (tmp_path / "saved" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "other" / "mp_rank_00").mkdir(parents=True)
    Path("train.jsonl").write_text('{"text": ""}\n{"messages": [}\n')
    mistakes: list[tuple[str, str, type[MegatronWrapError], str]] = [
        (f"{TRAIN}.global_batch_size=3", f"{TRAIN}.global_batch_size=8", ConfigError, "global_batch_size"),
        (f"{TRAIN}.micro_batch_size=8", f"{TRAIN}.micro_batch_size=2", LayoutError, "micro_batch_size 8"),
        (f"{DATA}.on_bad_sample=error", f"{DATA}.on_bad_sample=skip", DataError, r"train\.jsonl:2: "),
        (f"{TRAIN}.load=saved", f"{TRAIN}.load=null", CheckpointError, "saved/mp_rank_00"),
        (
            "megatron_wrap.models.reference={checkpoint: other}",
            "megatron_wrap.models.reference=null",
            CheckpointError,
            r"models\.reference: other/mp_rank_00",
        ),
        ("megatron_wrap.flow.flow_key=gpt_stf", "megatron_wrap.flow.flow_key=gpt_sft", ConfigError, "gpt_stf"),
    ]
    files = sorted(tmp_path.rglob("*"))
    for first in range(len(mistakes) + 1):
        corrected = [correction for _, correction, _, _ in mistakes[:first]]
        overrides = [*DATA_FILES, *corrected, *(mistake for mistake, *_ in mistakes[first:])]
        config = load_run_config("run.yaml", overrides)
        if first == len(mistakes):
            validate(config, 4)
            assert sorted(tmp_path.rglob("*")) == files
            break
        _, _, error, message = mistakes[first]
        with pytest.raises(error, match=message):
            validate(config, 4)


def test_a_process_of_a_run_leaves_layout_data_and_flow_to_the_command_that_started_it() -> None:
    Path("train.jsonl").write_text("{broken\n")
    MegatronWrap("run.yaml", [*DATA_FILES, f"{TRAIN}.micro_batch_size=4", "megatron_wrap.flow.flow_key=unknown"])


def test_a_flow_of_the_user_s_script_is_not_looked_up() -> None:
    config = load_run_config("run.yaml", ["megatron_wrap.flow.flow_key=registered_by_the_script"])
    validate(config, 1, own_script=True)
    with pytest.raises((ConfigError, FlowError), match="registered_by_the_script"):
        validate(config, 1)
