"""Linear cross-entropy: every flow and layout has the loss and the gradients of the same run with stored logits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import _model_runs
import numpy
import pytest
import torch
from _agreement import assert_layouts_agree, assert_same_gradients
from _covering import covering, family_and_axes
from _layouts import PACKED, layout
from _started import gradients_of, started, without_measured
from layout_runs import token_samples

KEY = "megatron_wrap.model_provider.linear_cross_entropy"


class Counts(NamedTuple):
    """How often the backward pass computed logits again, and how often all logits were stored."""

    recomputed: int
    stored: int


@contextmanager
def _small_chunks() -> Iterator[Any]:
    """Chunks of at most 13 tokens; yields what counts the calls."""
    from megatron_wrap.ops import deferred_logits, token_chunks

    with (
        mock.patch.object(token_chunks, "MIN_CHUNK_TOKENS", 13),
        mock.patch.object(token_chunks, "chunk_bytes", return_value=1),
        mock.patch.object(token_chunks, "_recomputed", wraps=token_chunks._recomputed) as recomputed,
        mock.patch.object(deferred_logits.DeferredLogits, "_warn") as stored,
    ):
        yield lambda: Counts(recomputed.call_count, stored.call_count)


def both(overrides: tuple[str, ...], batch: list[Any] | None = None) -> dict[str, Any]:
    """Gradients of a first step, then the metrics of two steps, with stored and with deferred logits.

    Returns:
        `stored` and `deferred`: (metrics of each step, on rank 0 the unsharded gradients by name); `counts` of the
        deferred run.
    """
    results: dict[str, Any] = {}
    for name, value in (("stored", "false"), ("deferred", "true")):
        with _small_chunks() as count:
            results[name] = _steps((*overrides, f"{KEY}={value}"), batch)
            results["counts"] = tuple(count())
    return results


def _steps(overrides: tuple[str, ...], batch: list[Any] | None) -> tuple[list[dict[str, float]], dict[str, Any]]:
    with started(_model_runs.CONFIG, overrides) as wrap:
        batch = batch or _model_runs.samples(wrap.global_batch_size, wrap.config.train.seq_length)
        gradients = gradients_of(wrap, batch)
        metrics = [wrap.train(batch) for _ in range(2)]
        metrics.append(wrap.evaluate({"set": batch}))
        keep = wrap.state.parallel.world.rank == 0
    return [without_measured(step) for step in metrics], gradients if keep else {}


SWITCHES = {
    "tied": ("megatron_lm.model.arch.untie_embeddings_and_output_weights=false",),
    "packed": (*PACKED, "megatron_lm.train.common.micro_batch_size=2"),
}
FLOW = "megatron_wrap.flow."
CASES = ["one-tied", "tp2", "tp2-nosp-tied", "pp2-tied", "pp2-vpp2", "cp2", "one-packed", "dp2-overlap"]
CASES += ["pp2-dp2-overlap-tied"]


def assert_equal(results: dict[str, Any]) -> None:
    """The metrics, and the gradient of each weight, of the deferred run are those of the stored one."""
    (stored, gradients), (deferred, actual) = results["stored"], results["deferred"]
    for of_stored, of_deferred in zip(stored, deferred, strict=True):
        assert of_stored.keys() == of_deferred.keys()
        for name, value in of_stored.items():
            numpy.testing.assert_allclose(of_deferred[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert_same_gradients(actual, gradients, 1e-6)


@pytest.mark.parametrize("case", covering(CASES))
def test_fine_tuning_equals_stored_logits(case: str, ranks):
    processes, overrides = layout(case, SWITCHES)
    results = ranks(processes).run(both, overrides)
    assert_equal(results[0])
    numpy.testing.assert_allclose(results[0]["stored"][0][0]["loss"], results[0]["deferred"][0][0]["loss"], rtol=1e-6)
    assert all(of_rank["counts"] == (0, 0) for of_rank in results)  # no second product, and no whole logits


def rows(seed: int, **longest: int) -> list[dict[str, Any]]:
    """Four samples of random tokens, up to so many by name."""
    generator = random.Random(seed)

    def ids(most: int) -> list[int]:
        return [generator.randrange(_model_runs.VOCAB) for _ in range(generator.randint(4, most))]

    return [{name: ids(most) for name, most in longest.items()} for _ in range(4)]


def windows() -> list[dict[str, Any]]:
    generator = random.Random(8)
    rows = [torch.tensor([generator.randrange(_model_runs.VOCAB) for _ in range(33)]) for _ in range(4)]
    return [
        {
            "tokens": row[:-1],
            "labels": row[1:],
            "loss_mask": (row[1:] % 3 > 0).float(),
            "position_ids": torch.arange(32),
        }
        for row in rows
    ]


REFERENCE, TEACHER = "megatron_wrap.models.reference=copy", "megatron_wrap.models.teacher=copy"
FLOWS: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "gpt_pretrain": (windows(), ()),
    "gpt_sft-smoothed": ([], (f"{FLOW}label_smoothing=0.1", f"{FLOW}z_loss_coefficient=0.01")),
    "gpt_dpo": (rows(5, prompt_ids=14, chosen_ids=14, rejected_ids=14), (REFERENCE, f"{FLOW}use_weighting=true")),
    "gpt_kto": (
        [{**row, "label": index % 2 == 0} for index, row in enumerate(rows(6, prompt_ids=12, completion_ids=14))],
        (REFERENCE,),
    ),
    "gpt_grpo": (
        [{**row, "advantage": index - 1.5} for index, row in enumerate(rows(7, prompt_ids=12, response_ids=14))],
        (f"{FLOW}entropy_coefficient=0.1", f"{FLOW}beta=0.0"),
    ),
    "gpt_distill": ([], (TEACHER, f"{FLOW}beta=0.3", f"{FLOW}label_weight=0.5")),
    "gpt_distill-top-k": ([], (TEACHER, f"{FLOW}beta=0.3", f"{FLOW}top_k=7")),
}


LAYOUTS = ("pp2-packed", "pp2-vpp2-tied", "cp2-packed-tied", "tp2")
"""Together they contain each parallel axis, packing and tied embeddings."""


@pytest.mark.parametrize(
    ("flow", "case"),
    covering(
        [(flow, LAYOUTS[(number + shift) % len(LAYOUTS)]) for shift in (0, 2) for number, flow in enumerate(FLOWS)],
        family_and_axes,
    ),
)
def test_other_flows_equal_stored_logits(flow: str, case: str, ranks):
    samples, overrides = FLOWS[flow]
    processes, of_layout = layout(case, SWITCHES)
    overrides = (f"{FLOW}__select__={flow.partition('-')[0]}", *overrides, *of_layout)
    results = ranks(processes).run(both, overrides, samples or None)
    assert_equal(results[0])
    recomputed, stored = zip(*(of_rank["counts"] for of_rank in results), strict=True)
    assert (sum(recomputed) > 0) is (flow != "gpt_pretrain")  # whose gradient is known before the forward pass
    assert sum(stored) == 0


@pytest.mark.matrix
def test_check_parity_with_linear_cross_entropy(ranks):
    assert_layouts_agree(ranks, ["tp2-sp-pp2", "cp2", "packed"], [f"{KEY}=true"], token_samples(16, 48))
