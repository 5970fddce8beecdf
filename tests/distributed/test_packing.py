"""Packed rows give the loss and the gradient of unpacked sequences on every layout, and so do micro-batches cut by a
budget of tokens."""

from __future__ import annotations

import random

import pytest
from _agreement import assert_layouts_agree
from _covering import covering
from layout_runs import token_samples

LAYOUTS = (
    *("packed", "packed-padded", "packed-tp2-sp", "packed-pp2", "packed-pp2-vpp2", "packed-cp2", "packed-tp2-sp-cp2"),
    *("packed-pp2-cp2", "packed-dp2-dopt", "packed-token-budget", "token-budget", "token-budget-cp2"),
    "token-budget-tp2-sp-dp2",
)
WITH_EXPERTS = ("packed-ep2", "packed-cp2-ep2", "token-budget-ep2")
MODELS = {
    "dense": ("tiny-llama", ()),
    "learned-positions": ("tiny-gpt2", ()),
    "window": ("tiny-llama", ("window_size=[9,0]",)),
    "experts": ("tiny-mixtral", ("moe_aux_loss_coeff=0.0", "moe_z_loss_coeff=null")),
    "latent": (
        "tiny-deepseek-v3",
        ("moe_router_load_balancing_type=none", "moe_aux_loss_coeff=0.0", "moe_router_enable_expert_bias=false"),
    ),
}
FLOWS = ("gpt_sft", "gpt_dpo")


def samples(flow: str) -> list[dict[str, list[int]]]:
    if flow == "gpt_sft":
        return token_samples(16, 48)
    generator = random.Random(5)
    lengths = {"prompt_ids": 8, "chosen_ids": 24, "rejected_ids": 24}
    return [
        {key: [generator.randrange(500) for _ in range(generator.randint(1, most))] for key, most in lengths.items()}
        for _ in range(16)
    ]


SINGLE = ("packed", "packed-padded", "packed-tp2-sp", "packed-pp2-vpp2", "packed-cp2", "token-budget-cp2")
"""Those of models that differ from `dense` in one operation, which depends on rows, padding or one axis."""


def groups() -> list[tuple[str, str, str]]:
    """Each layout with a dense model and with experts, each axis with each model; half of the layouts of a model with
    each flow. The layouts of a flow and a model share a reference."""
    together: dict[tuple[str, str], list[str]] = {(flow, model): [] for flow in FLOWS for model in MODELS}
    for number, model in enumerate(MODELS):
        layouts = LAYOUTS if model in ("dense", "experts") else SINGLE
        for position, layout in enumerate((*layouts, *(WITH_EXPERTS if model in ("experts", "latent") else ()))):
            together[FLOWS[(number + position) % 2], model].append(layout)
    return [(flow, model, "+".join(layouts)) for (flow, model), layouts in together.items()]


@pytest.mark.parametrize(
    ("flow", "model", "layouts"),
    # models differ in one operation; both flows have packed pairs or rows on each axis in other tests of packing
    covering(groups(), lambda _: {"packed"}),
)
def test_packed_equals_unpacked(flow, model, layouts, ranks):
    arch, overrides = MODELS[model]
    settings = (
        f"megatron_wrap.flow.__select__={flow}",
        f"megatron_lm.model.arch.__select__={arch}",
        "megatron_lm.model.arch.vocab_size=4096",
        *([] if flow == "gpt_sft" else ["megatron_wrap.models.reference=copy"]),
        *(f"megatron_lm.model.arch.{override}" for override in overrides),
    )
    report = assert_layouts_agree(ranks, layouts.split("+"), settings, samples(flow))
    assert max(row.objective_difference for row in report.rows) <= 1e-6, report.table()
    assert max(row.gradient_difference for row in report.rows) <= 1e-5, report.table()
