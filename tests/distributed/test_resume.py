"""Six steps equal three steps, a checkpoint and three more steps: bit for bit in new processes on the same layout, and
within rounding on another."""

from __future__ import annotations

from pathlib import Path

import _checkpoint_runs as runs
import pytest
from _checkpoint_runs import (
    BF16,
    CP2,
    DISTRIBUTED,
    DROPOUT,
    EP2,
    ETP1,
    EXPERTS,
    FP16,
    FROZEN,
    GPT_OSS,
    LINEAR,
    MLA,
    MUON,
    OLMO,
    ONLY_EP2,
    OVERLAP,
    PP2,
    PP2_VPP2,
    SAVED,
    SGD,
    STEPS,
    TIED,
    TP2,
    in_new_processes,
)
from _covering import quick

from megatron_wrap.config import load_resolved

SEQUENTIAL = ("megatron_lm.model.arch.experts_impl=sequential",)
"""The other side computes the experts in grouped products."""
LORA = ("megatron_wrap.adapter.__select__=lora", "megatron_wrap.adapter.r=4")
MUON_FP32 = ("megatron_lm.train.optimizer.muon_ns_dtype=fp32",)
SAME_LAYOUT = {
    "one-rank": (1, ()),
    "one-rank-fp16": (1, FP16),
    "tp2-sp": (2, TP2),
    "dp2": (2, ()),
    "dp2-sgd": (2, SGD),
    "dp2-muon-experts-bf16": (2, (*MUON, *EXPERTS, *BF16)),
    "pp2-vpp2-muon": (2, (*PP2_VPP2, *MUON)),
    "dp2-distributed": (2, DISTRIBUTED),
    "dp2-distributed-overlap": (2, (*DISTRIBUTED, *OVERLAP)),
    "dp2-distributed-bf16": (2, (*DISTRIBUTED, *BF16)),
    "tp2-bf16": (2, (*TP2, *BF16)),
    "pp2-vpp2": (2, PP2_VPP2),
    "cp2": (2, CP2),
    "pp2-frozen-stage-distributed-bf16": (2, (*PP2, *FROZEN, *DISTRIBUTED, *BF16)),
    "ep2-distributed-bf16": (2, (*EP2, *DISTRIBUTED, *BF16)),
    "dp2-experts": (2, EXPERTS),  # a replica sends the other the part of the experts that it has read
}
OTHER_LAYOUT = {
    "tp2-to-1": ((2, TP2), (1, ())),
    "1-to-tp2": ((1, ()), (2, TP2)),
    "pp2-vpp2-to-1": ((2, PP2_VPP2), (1, ())),
    "dp2-to-1": ((2, ()), (1, ())),
    "dp2-distributed-to-1": ((2, DISTRIBUTED), (1, DISTRIBUTED)),
    "tp2-distributed-to-dp2": ((2, (*TP2, *DISTRIBUTED)), (2, DISTRIBUTED)),
    "tied-pp2-to-tp2": ((2, (*PP2, *TIED)), (2, (*TP2, *TIED))),
    "frozen-tied-pp2-to-tp2": ((2, (*PP2, *TIED, *FROZEN, *DISTRIBUTED)), (2, (*TP2, *TIED, *FROZEN, *DISTRIBUTED))),
    "sgd-tp2-to-dp2": ((2, (*TP2, *SGD)), (2, SGD)),
    "muon-tp2-ep2-to-pp2": (
        (2, (*TP2, *EP2, *ETP1, *MUON, *MUON_FP32)),
        (2, (*PP2, *EXPERTS, *MUON, *MUON_FP32)),
    ),
    "muon-adapter-pp2-to-tp2": ((2, (*PP2, *MUON, *MUON_FP32, *LORA)), (2, (*TP2, *MUON, *MUON_FP32, *LORA))),
    "ep2-to-sequential-1": ((2, EP2), (1, (*EXPERTS, *SEQUENTIAL))),
    "sequential-1-to-ep2": ((1, (*EXPERTS, *SEQUENTIAL)), (2, EP2)),
    "ep2-distributed-to-1": ((2, (*EP2, *DISTRIBUTED)), (1, (*EXPERTS, *DISTRIBUTED))),
    "sequential-tp2-distributed-to-1": (
        (2, (*TP2, *EXPERTS, *DISTRIBUTED, *SEQUENTIAL)),
        (1, (*EXPERTS, *DISTRIBUTED)),
    ),
    "latent-tp2-ep2-to-pp2": ((2, (*TP2, *EP2, *ETP1, *MLA)), (2, (*PP2, *EXPERTS, *MLA))),
    "gpt-oss-tp2-to-ep2": ((2, (*TP2, *GPT_OSS)), (2, (*GPT_OSS, *ONLY_EP2))),
    "linear-tp2-distributed-to-pp2": ((2, (*TP2, *LINEAR, *DISTRIBUTED)), (2, (*PP2, *LINEAR, *DISTRIBUTED))),
    "olmo-tp2-to-pp2": ((2, (*TP2, *OLMO)), (2, (*PP2, *OLMO))),
    "tp2-ep2-to-pp2": ((2, (*TP2, *EP2, *ETP1)), (2, (*PP2, *EXPERTS))),
}


@pytest.mark.parametrize(
    "name", quick(SAME_LAYOUT, ("one-rank-fp16", "tp2-sp", "pp2-vpp2", "ep2-distributed-bf16", "dp2-experts"))
)
def test_the_same_layout_resumes_bit_for_bit_with_dropout(tmp_path: Path, name: str, ranks) -> None:
    processes, overrides = SAME_LAYOUT[name]
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
    "name",
    quick(OTHER_LAYOUT, ("tp2-distributed-to-dp2", "latent-tp2-ep2-to-pp2", "frozen-tied-pp2-to-tp2")),
)
def test_another_layout_resumes_within_rounding(tmp_path: Path, name: str, ranks) -> None:
    (before, saved), (after, resumed) = OTHER_LAYOUT[name]
    straight = ranks(before).run(runs.train, tmp_path, saved, STEPS, (SAVED,))[0]
    rest = ranks(after).run(runs.train, tmp_path, resumed)[0]
    assert len(rest) == STEPS - SAVED
    for expected, actual in zip(straight[SAVED:], rest, strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)
