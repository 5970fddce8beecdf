"""Six steps equal three steps, a checkpoint and three more steps: bit for bit in new processes on the same layout, and
within rounding on another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import _checkpoint_runs as runs
import pytest
from _checkpoint_runs import DISTRIBUTED, DROPOUT, OVERLAP, PP2, SAVED, STEPS, in_new_processes
from _covering import quick
from _layouts import layout

from megatron_wrap.config import load_resolved

SWITCHES = {
    "fp16": runs.FP16,
    "bf16": runs.BF16,
    "sgd": runs.SGD,
    "muon": runs.MUON,
    "fp32_muon": (*runs.MUON, "megatron_lm.train.optimizer.muon_ns_dtype=fp32"),
    "experts": runs.EXPERTS,
    # the other side computes the experts in grouped products
    "sequential": (*runs.EXPERTS, "megatron_lm.model.arch.experts_impl=sequential"),
    "latent": (*runs.EXPERTS, *runs.MLA),
    "gpt_oss": runs.GPT_OSS,
    "linear": runs.LINEAR,
    "olmo": runs.OLMO,
    "tied": runs.TIED,
    "frozen": runs.FROZEN,
    "lora": ("megatron_wrap.adapter.__select__=lora", "megatron_wrap.adapter.r=4"),
}
"""Parts of names of layouts: models, optimizers and types."""
SAME_LAYOUT = (
    *("one", "one-fp16", "tp2", "pp2-vpp2", "cp2", "dp2-overlap", "dp2-dopt-bf16", "dp2-muon-experts-bf16"),
    *("pp2-frozen-dopt-bf16", "ep2-experts-dopt-bf16"),
    "dp2-experts",  # a replica sends the other the part of the experts that it has read
)
OTHER_LAYOUT = (
    *("tp2 one", "pp2-vpp2 one", "tp2-dopt dp2-dopt", "pp2-tied-frozen-dopt tp2-tied-frozen-dopt", "tp2-sgd dp2-sgd"),
    *("tp2-ep2-etp1-experts-fp32_muon pp2-experts-fp32_muon", "pp2-fp32_muon-lora tp2-fp32_muon-lora"),
    *("ep2-experts one-sequential", "one-sequential ep2-experts", "tp2-sequential-dopt one-experts-dopt"),
    *("tp2-ep2-etp1-latent pp2-latent", "tp2-gpt_oss ep2-gpt_oss", "tp2-linear-dopt pp2-linear-dopt"),
    "tp2-olmo pp2-olmo",
)
"""Layout that saves, and layout that resumes."""


@pytest.mark.parametrize(
    "name", quick(SAME_LAYOUT, ("one-fp16", "tp2", "pp2-vpp2", "ep2-experts-dopt-bf16", "dp2-experts"))
)
def test_the_same_layout_resumes_bit_for_bit_with_dropout(tmp_path: Path, name: str, ranks) -> None:
    processes, overrides = layout(name, SWITCHES)
    overrides = (*overrides, *DROPOUT)
    straight = ranks(processes).run(runs.train, tmp_path, overrides, STEPS, (SAVED,))
    resumed = in_new_processes(processes, runs.train, tmp_path, overrides)
    assert (len(straight[0]), len(resumed[0])) == (STEPS, STEPS - SAVED)
    assert [steps[SAVED:] for steps in straight] == resumed


def test_without_random_states_dropout_differs(tmp_path: Path, ranks) -> None:
    straight = ranks(1).run(runs.train, tmp_path, DROPOUT, 5, (SAVED,))[0]
    without = ranks(1).run(runs.train, tmp_path, (*DROPOUT, "megatron_lm.train.common.no_load_rng=true"), 5)[0]
    assert [step[0] for step in without] != [step[0] for step in straight[SAVED:]]


def test_a_run_keeps_what_its_checkpoint_was_saved_with(tmp_path: Path, ranks) -> None:
    """On the CPU neither would be chosen; the optimizer states could not be loaded then."""
    straight = ranks(1).run(runs.train, tmp_path, (*DISTRIBUTED, *OVERLAP), 4, (2,))[0]
    left_open = [f"{text.partition('=')[0]}=null" for text in (*DISTRIBUTED, *OVERLAP)]
    assert ranks(1).run(runs.train, tmp_path, tuple(left_open), 4, (4,))[0] == straight[2:]
    saved = load_resolved(tmp_path / "iter_0000004/resolved.yaml")["megatron_lm"]
    assert saved["train"]["optimizer"]["use_distributed_optimizer"] is True
    assert saved["misc"]["ddp"]["overlap_param_gather"] is True


def test_a_save_does_not_change_the_continuing_run(tmp_path: Path, ranks) -> None:
    overrides = (*DISTRIBUTED, *OVERLAP, *DROPOUT)
    saving = ranks(2).run(runs.train, tmp_path / "a", overrides, 4, (1, 2, 3))
    assert saving == ranks(2).run(runs.train, tmp_path / "b", overrides, 4)


def _calls_that_read_yaml(folder: Path) -> list[tuple[int, int]]:
    """Number of calls in config/reading, and of YAML files read, of a save and of a load."""
    counts = []
    with runs.started(folder) as wrap:
        wrap.train(runs.samples()[: runs.BATCH])
        for action in (wrap.save, wrap.load):
            names: list[str] = []

            def enter(frame: Any, event: str, _: Any, names: list[str] = names) -> None:
                if event == "call" and "/megatron_wrap/config/reading/" in frame.f_code.co_filename:
                    names.append(frame.f_code.co_name)

            sys.setprofile(enter)
            try:
                action()
            finally:
                sys.setprofile(None)
            counts.append((len(names), names.count("read_yaml")))
    return counts


def test_a_save_writes_what_it_was_given_and_a_load_reads_the_saved_configuration_once(tmp_path: Path, ranks) -> None:
    (save, load), *_ = ranks(1).run(_calls_that_read_yaml, tmp_path)
    assert save == (0, 0)
    assert load[1] == 1


def test_another_split_of_the_pipeline_computes_the_same_loss(tmp_path: Path, ranks) -> None:
    """The weights are the same bit for bit; the gradient norm adds the stages' parts in another order."""
    uneven = (*PP2, "megatron_lm.model.parallel.pipeline_model_parallel_layout=Et*3|tL", *DISTRIBUTED)
    straight = ranks(2).run(runs.train, tmp_path, uneven, STEPS, (SAVED,))[0]
    chosen = "megatron_lm.model.parallel.pipeline_model_parallel_layout=null"
    rest = ranks(2).run(runs.train, tmp_path, (*uneven, chosen))[0]
    assert rest == straight[SAVED:]  # a resumed run keeps the split of its checkpoint
    even = "megatron_lm.model.parallel.pipeline_model_parallel_layout=Et*2|t*2L"
    other = ranks(2).run(runs.train, tmp_path, (*uneven, even))[0]
    assert other[0][0] == straight[SAVED][0]
    for expected, actual in zip(straight[SAVED:], other, strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "case",
    quick(OTHER_LAYOUT, [OTHER_LAYOUT[index] for index in (2, 3, 10)]),
)
def test_another_layout_resumes_within_rounding(tmp_path: Path, case: str, ranks) -> None:
    (before, saved), (after, resumed) = (layout(name, SWITCHES) for name in case.split())
    straight = ranks(before).run(runs.train, tmp_path, saved, STEPS, (SAVED,))[0]
    rest = ranks(after).run(runs.train, tmp_path, resumed)[0]
    assert len(rest) == STEPS - SAVED
    for expected, actual in zip(straight[SAVED:], rest, strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)
