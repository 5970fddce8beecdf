"""Context-parallel ranks that exchange heads (`cp_comm_type: a2a`), gather keys and values (all_gather) or pass them
around a ring (p2p) train, evaluate and generate like one rank."""

from __future__ import annotations

import _exchange_runs as runs
import pytest
import torch
from _agreement import assert_layouts_agree
from _covering import quick
from layout_runs import token_samples

ARCH, PARALLEL = "megatron_lm.model.arch.", "megatron_lm.model.parallel."
RECOMPUTE = "megatron_lm.train.recompute."
BY_HEADS, GATHERED, RING = (f"{runs.KEY}={exchange}" for exchange in ("a2a", "all_gather", "p2p"))
BF16, CP2 = "megatron_lm.train.dtype.__select__=bf16", f"{PARALLEL}context_parallel_size=2"
WINDOWS_AND_SINKS = (
    *(f"{ARCH}window_size=[11,0]", f"{ARCH}window_attn_skip_freq=2", f"{ARCH}softmax_type=learnable"),
    f"{ARCH}num_query_groups=2",  # fewer than the ranks of cp4, and one for each tensor-parallel rank
)
SINKS = (f"{ARCH}softmax_type=learnable", f"{ARCH}num_query_groups=2")
RECOMPUTED = (
    *(f"{RECOMPUTE}recompute_granularity=full", f"{RECOMPUTE}recompute_method=uniform"),
    f"{RECOMPUTE}recompute_num_layers=1",
)
LATENT = (
    *(f"{ARCH}multi_latent_attention=true", f"{ARCH}q_lora_rank=32", f"{ARCH}kv_lora_rank=24"),
    *(f"{ARCH}qk_head_dim=8", f"{ARCH}qk_pos_emb_head_dim=8", f"{ARCH}v_head_dim=12", f"{ARCH}num_query_groups=null"),
)


AGREEING: dict[str, tuple[tuple[str, ...], str]] = {
    "heads, windows and sinks": ((BY_HEADS, *WINDOWS_AND_SINKS), "cp4"),
    "keys": ((GATHERED, *SINKS), "cp4 packed-tp2-sp-cp2"),
    "ring, sinks": ((RING, *SINKS), "cp4 packed-tp2-sp-cp2"),
    # the others have the marker matrix
    "heads, packed": ((BY_HEADS, *WINDOWS_AND_SINKS), "packed-tp2-sp-cp2"),
    "heads, dense": ((BY_HEADS,), "packed-cp2 cp2-dp2 pp2-cp2"),
    "heads, latent": ((BY_HEADS, *LATENT), "packed-tp2-sp-cp2"),
    "ring, dense": ((RING,), "packed-cp4 cp2-dp2 pp2-cp2"),
    "ring, latent, recomputed": ((RING, *LATENT, *RECOMPUTED), "cp4 packed-cp4"),
    "ring, windows in some layers": ((RING, *WINDOWS_AND_SINKS), "cp2"),
}


@pytest.mark.parametrize("name", quick(AGREEING, list(AGREEING)[:3]))
def test_gradients_are_those_of_one_rank(name, ranks):
    overrides, layouts = AGREEING[name]
    report = assert_layouts_agree(ranks, layouts.split(), overrides, token_samples(16, 48), steps=2)
    if RING in overrides:
        assert max(row.objective_difference for row in report.rows) <= 1e-6, report.table()
        assert max(row.gradient_difference for row in report.rows) <= 1e-5, report.table()


@pytest.mark.parametrize("processes", [2, 4])
def test_a_ring_has_the_output_and_gradients_of_a_softmax(processes, ranks):
    """Of two rows, and of a packed row, in which some sequences have one token in each chunk. In fp32 what arrives is
    overwritten when it may be in the memory of GPUs."""
    unit = 2 * processes
    whole, packed = (5 * unit,), (3 * unit, unit, 4 * unit, unit)
    for lengths, rows in ((whole, 2), (packed, 1)):
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
            for causal, value_width, with_sinks in ((True, 8, True), (True, 5, False), (False, 8, False)):
                short_lived = dtype == torch.float32 and value_width == 8
                arguments = (lengths, rows, dtype, causal, value_width, with_sinks, short_lived)
                for results in ranks(processes).run(runs.ring_and_softmax, *arguments):
                    for name, (ours, expected) in results.items():
                        error = float((ours.double() - expected).norm() / expected.norm())
                        assert error <= bound, (arguments, name, error)


def test_a_run_evaluates_generates_and_resumes_with_the_exchange_that_it_began_with(ranks, tmp_path):
    def saving(folder: str) -> tuple[str, ...]:
        return (
            CP2,
            f"megatron_lm.train.common.save={tmp_path / folder}",
            f"megatron_wrap.logger.output_dir={tmp_path}",
        )

    pool = ranks(2)
    by_heads = pool.run(runs.train, (*saving("a2a"), BY_HEADS), 4)[0]
    chosen = pool.run(runs.train, saving("chosen"), 4)[0]
    in_half_precision = pool.run(runs.train, (CP2, BF16), 1)[0]
    assert (by_heads["value"], set(by_heads["exchanges"])) == ("a2a", {"a2a"})
    assert (chosen["value"], chosen["set by"], set(chosen["exchanges"])) == ("all_gather", "MACHINE", {"all_gather"})
    assert (in_half_precision["value"], set(in_half_precision["exchanges"])) == ("p2p", {"p2p"})
    assert in_half_precision["losses"] == pytest.approx(chosen["losses"][:1], rel=1e-3)
    assert by_heads["losses"] == pytest.approx(chosen["losses"], rel=1e-5)
    assert by_heads["generated"] == chosen["generated"]
    pool.run(runs.train, (*saving("parts"), BY_HEADS), 2)
    resumed = pool.run(runs.train, saving("parts"), 4)[0]
    assert (resumed["value"], set(resumed["exchanges"])) == ("a2a", {"a2a"})
    assert resumed["losses"] == by_heads["losses"][2:]
    assert resumed["evaluation"] == by_heads["evaluation"]
