"""Reference models: from a folder, offloaded, following the policy, and computed before training."""

from __future__ import annotations

import json

import _dpo_runs as runs
import numpy
import pytest
from _checkpoint_runs import BF16, DROPOUT, TP2, in_new_processes
from _covering import quick
from _dpo_runs import COPY, REFERENCE, TRAIN
from _layouts import layout
from _started import refusal_of

ONE_EACH = f"{TRAIN}.micro_batch_size=1"
ROUNDING = 3e-6
"""Rounding error of a margin: log-probabilities near -120 have an ulp of 7.6e-6 in fp32; four of them times beta."""
STEPS = 2
"""Of runs that are compared with another layout: each update of Adam adds to the differences by rounding."""
EXPERTS = (
    *("megatron_lm.model.arch.num_experts=4", "megatron_lm.model.arch.moe_router_topk=2"),
    "megatron_wrap.logger.add_expert_load_to_metrics=true",
)
"""The policy's routers count tokens, in buffers that the reference's do not have."""


@pytest.fixture(scope="module")
def first_weights(ranks, tmp_path_factory):
    """A Hugging Face folder of the policy's first weights."""
    folder = tmp_path_factory.mktemp("first") / "hf"
    ranks(1).run(runs.export, str(folder))
    return folder


@pytest.fixture(scope="module")
def smaller(ranks, tmp_path_factory):
    """A Hugging Face folder of another architecture."""
    folder = tmp_path_factory.mktemp("smaller") / "hf"
    ranks(1).run(runs.export, str(folder), runs.SMALLER)
    return folder


def test_equal_weights_from_a_folder_or_on_the_host_give_equal_steps(ranks, first_weights):
    expected = ranks(1).run(runs.train, COPY, runs.pairs(), 4)[0]
    for reference in (f"{{hf_path: {first_weights}}}", "{copy: true, offload: true}"):
        assert ranks(1).run(runs.train, (f"{REFERENCE}={reference}",), runs.pairs(), 4)[0] == expected, reference


LAYOUTS = ("one", "tp2", "pp2", "cp2", "one-packed")


@pytest.fixture(scope="module")
def of_smaller(ranks, smaller):
    """Steps with the other architecture as the reference, on one rank."""
    return ranks(1).run(runs.train, (f"{REFERENCE}={{hf_path: {smaller}}}",), runs.pairs(), STEPS)[0]


@pytest.mark.parametrize("name", quick(LAYOUTS, ("tp2", "pp2")))
def test_a_reference_of_another_architecture(ranks, smaller, of_smaller, name):
    processes, of_layout = layout(name)
    override = f"{REFERENCE}={{hf_path: {smaller}, offload: true}}"
    actual = ranks(processes).run(runs.train, (override, *of_layout, ONE_EACH), runs.pairs(), STEPS)[0]
    assert abs(actual[0]["rewards/chosen"]) > 1e-3  # the models differ from the first step on
    for ours, theirs in zip(actual, of_smaller, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=ROUNDING)


@pytest.mark.parametrize("name", quick(LAYOUTS, ("cp2", "one-packed")))
def test_precomputed_outputs_equal_the_live_model(ranks, smaller, of_smaller, tmp_path, name):
    processes, of_layout = layout(name)
    keys = f"hf_path: {smaller}, precomputed: {tmp_path}/outputs"
    overrides = (f"{REFERENCE}={{{keys}}}", *of_layout, ONE_EACH)
    stored = ranks(processes).run(runs.precompute, overrides, [*runs.pairs(), *runs.pairs(3)], tmp_path / "outputs")
    assert stored == [40] * processes  # a sample that comes again is stored once
    actual = ranks(processes).run(runs.train, overrides, runs.pairs(), STEPS)[0]
    live = ranks(processes).run(
        runs.train, (f"{REFERENCE}={{hf_path: {smaller}}}", *of_layout, ONE_EACH), runs.pairs(), STEPS
    )
    # packed, the command's micro-batches are others than those of training, so logits are rounded differently
    loss_rounding = ROUNDING if "packed" in name else 0.0
    for ours, theirs in zip(actual, live[0], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6, abs=loss_rounding)
        assert ours == pytest.approx(theirs, rel=1e-5, abs=ROUNDING)


@pytest.mark.parametrize("name", quick(("tp2", "one-packed"), ("one-packed",)))
def test_precomputed_outputs_of_the_kl_estimate(ranks, first_weights, tmp_path, name):
    """In the order of the batches in which they were computed they equal the live model; in another order each prompt
    keeps its answer."""
    processes, of_layout = layout(name)
    samples = [
        {"prompt_ids": pair["prompt_ids"], "completion_ids": pair["chosen_ids"], "label": index % 3 > 0}
        for index, pair in enumerate(runs.pairs(8))
    ]
    overrides = ("megatron_wrap.flow.__select__=gpt_kto", *runs.SMALLER, *of_layout, ONE_EACH)
    live = (f"{REFERENCE}={{hf_path: {first_weights}}}", *overrides)
    stored = (f"{REFERENCE}={{hf_path: {first_weights}, precomputed: {tmp_path}/outputs}}", *overrides)
    assert ranks(processes).run(runs.precompute, stored, samples, tmp_path / "outputs") == [8] * processes
    expected = ranks(processes).run(runs.train, live, samples, 2)[0]
    actual = ranks(processes).run(runs.train, stored, samples, 2)[0]
    assert expected[0]["kl"] > 1e-3
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=10 * ROUNDING)
    batches = (samples[:4], [samples[index] for index in (2, 0, 3, 1)])
    in_order, other_order = (ranks(processes).run(runs.train, stored, batch, 1)[0][0]["kl"] for batch in batches)
    assert other_order == pytest.approx(in_order, rel=1e-4)


def test_wrong_precomputed_outputs_are_refused(ranks, tmp_path):
    overrides = (f"{REFERENCE}={{precomputed: {tmp_path}/outputs}}",)
    assert "no precomputed outputs" in ranks(1).run(runs.refusal, overrides)[0]
    ranks(1).run(runs.precompute, overrides, runs.pairs()[1:], tmp_path / "outputs")
    message = ranks(1).run(runs.refusal, overrides, runs.pairs())[0]
    assert json.dumps(runs.pairs()[0])[:40] in message
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in [*runs.pairs()[1:], runs.pairs()[0]]))
    data = (
        "megatron_wrap.data.__select__=jsonl",
        f"megatron_wrap.data.train={file}",
        "megatron_wrap.data.shuffle=false",
    )
    assert f"{file}:40" in ranks(1).run(refusal_of, runs.train_on_own_data, (*overrides, *data))[0]
    message = ranks(1).run(runs.refusal, (*overrides, f"{TRAIN}.seq_length=32"), runs.pairs())[0]
    assert "seq_length: 40 there and 32 here" in message


def test_a_checkpoint_as_reference(ranks, tmp_path):
    """Its weights after two steps, loaded on another layout."""
    ranks(2).run(runs.train, (*COPY, *TP2, f"{TRAIN}.save={tmp_path}"), runs.pairs(), 2, 2)
    overrides = (f"{REFERENCE}={{checkpoint: {tmp_path}, offload: true}}",)
    actual = ranks(1).run(runs.train, overrides, runs.pairs(), 3)[0]
    outputs = ranks(1).run(runs.outputs, (f"{TRAIN}.load={tmp_path}", f"{TRAIN}.finetune=true"), runs.pairs())[0]
    expected = ranks(1).run(runs.train, (), runs.with_reference(outputs), 3)[0]
    assert abs(actual[0]["rewards/chosen"]) > 1e-3
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=ROUNDING)


def test_a_damaged_checkpoint_as_reference_is_named_with_the_newest_whole_one(ranks, tmp_path):
    ranks(1).run(runs.train, (*COPY, f"{TRAIN}.save={tmp_path}", f"{TRAIN}.save_interval=1"), runs.pairs(), 2)
    for name in ("__0_0.distcp", ".metadata"):
        file = tmp_path / "iter_0000002" / name
        content = file.read_bytes()
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        message = ranks(1).run(runs.refusal, (f"{REFERENCE}={{checkpoint: {tmp_path}}}",), runs.pairs())[0]
        assert f"the reference model's checkpoint {file.parent} is damaged: {name} differs" in message
        assert f"set {REFERENCE}.checkpoint to {tmp_path / 'iter_0000001'}, the newest whole one there" in message
        file.write_bytes(content)


def test_a_reference_follows_the_policy(ranks):
    copied = ranks(1).run(
        runs.policy_and_reference, (f"{REFERENCE}={{copy: true, refresh_interval: 2}}",), runs.pairs(), 4
    )[0]
    for step, of_policy in enumerate([0, 0, 2, 2, 4]):
        assert numpy.array_equal(copied[step][1], copied[of_policy][0]), step
    for more in ((), (*BF16, *EXPERTS)):
        overrides = (f"{REFERENCE}={{copy: true, ema_decay: 0.75, offload: true}}", *more)
        averaged = ranks(1).run(runs.policy_and_reference, overrides, runs.pairs(), 3)[0]
        expected = averaged[0][0].astype(numpy.float64)
        for policy, reference in averaged[1:]:
            expected = 0.75 * expected + 0.25 * policy
            numpy.testing.assert_allclose(reference, expected, rtol=1e-5, atol=1e-7)
        assert abs(expected - averaged[0][0]).max() > 1e-4


FOLLOWING = {
    "one": "{copy: true, refresh_interval: 3}",
    "tp2": "{copy: true, ema_decay: 0.9, refresh_interval: 2}",
    "one-bf16": "{copy: true, ema_decay: 0.9, offload: true}",
}
"""Layout -> reference."""


@pytest.mark.parametrize("name", quick(FOLLOWING, ("one-bf16",)))
def test_a_following_reference_resumes_bit_for_bit(tmp_path, name):
    processes, of_layout = layout(name, {"bf16": BF16})
    overrides = (f"{REFERENCE}={FOLLOWING[name]}", *of_layout, *DROPOUT, f"{TRAIN}.save={tmp_path}", ONE_EACH)
    straight = in_new_processes(processes, runs.train, overrides, runs.pairs(), 7, 4)[0]
    assert (tmp_path / "reference" / "iter_0000004").is_dir()
    resumed = in_new_processes(processes, runs.train, overrides, runs.pairs(), 7, 7)[0]
    assert len(resumed) == 3
    assert straight[4:] == resumed


def test_a_reference_that_does_not_fit_is_refused(ranks, smaller, tmp_path):
    message = ranks(1).run(runs.refusal, (f"{REFERENCE}={{hf_path: {smaller}, ema_decay: 0.9}}",))[0]
    assert "num_layers is 2 there and 4 here" in message
    message = ranks(1).run(runs.refusal, (f"{REFERENCE}={{hf_path: {tmp_path}/none}}",))[0]
    assert f"{REFERENCE}: " in message
    assert f"{tmp_path}/none" in message
    ranks(1).run(runs.export, str(tmp_path / "hf"), (*runs.SMALLER, "megatron_lm.model.arch.vocab_size=300"))
    message = ranks(1).run(runs.refusal, (f"{REFERENCE}={{hf_path: {tmp_path}/hf}}",))[0]
    assert "a vocabulary of 300 entries and the run one of 500" in message
    save = (f"{TRAIN}.save={tmp_path}/run",)
    ranks(1).run(runs.train, (*COPY, *save), runs.pairs(), 2, 2)
    message = ranks(1).run(runs.refusal, (*save, f"{REFERENCE}={{copy: true, refresh_interval: 1}}"))[0]
    assert "no reference model of iteration 2" in message
