"""Supervised fine-tuning: loss mask, shift, padding and truncation of conversations. No process group."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, pad
from transformers.modeling_outputs import ModelOutput
from transformers.trainer_pt_utils import LabelSmoother

from megatron_wrap.data.chat.tokenizer import load_tokenizer
from megatron_wrap.errors import DataError
from megatron_wrap.flow import FlowContext, MegatronWrapGPTModelSFTFlow, Total
from megatron_wrap.flow.pretrain import MegatronWrapGPTModelPretrainFlow
from megatron_wrap.flow.shared import cross_entropy as cross_entropy_module
from megatron_wrap.flow.shared import text as text_module
from megatron_wrap.ops import log_probs_and_logsumexp, token_log_probs, token_terms

pytestmark = pytest.mark.transformers

SEQ_LENGTH = 256


@pytest.fixture(scope="module")
def tokenizer(sample_data) -> Any:
    return load_tokenizer(sample_data / "tokenizer")


@pytest.fixture(scope="module")
def conversations(sample_data) -> list[dict[str, Any]]:
    with open(sample_data / "validation.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines][:40]


def flow(
    tokenizer: Any = None,
    micro_batch_size: int = 2,
    seq_length: int = SEQ_LENGTH,
    vocab_size: int = 4096,
    **options: Any,
) -> MegatronWrapGPTModelSFTFlow:
    context = FlowContext(
        micro_batch_size, seq_length, vocab_size, 1, lambda part: part, lambda value: value, tokenizer
    )
    config = MegatronWrapGPTModelSFTFlow.Config(flow_key="gpt_sft", **options)
    return MegatronWrapGPTModelSFTFlow(config, context)


def test_the_loss_mask_covers_exactly_the_assistant_s_turns(tokenizer, conversations):
    """The masked labels decode to each assistant's text and the end token of its turn."""
    for conversation in conversations:
        _, loss_inputs = flow(tokenizer, 1, seq_length=4096).collate_data_micro_batch(iter([conversation]))
        learned = loss_inputs["labels"][0][loss_inputs["loss_mask"][0] == 1].tolist()
        answers = [m["content"] for m in conversation["messages"] if m["role"] == "assistant"]
        text = tokenizer.decode(learned)
        for answer in answers:
            assert answer.strip() in text
        ends = text.count(tokenizer.eos_token)
        assert ends == len(answers)
        remaining = text.replace(tokenizer.eos_token, "")
        assert remaining.replace("\n", "").strip() == "".join(a.strip() for a in answers).replace("\n", "")


def test_labels_are_the_ids_of_the_chat_template_shifted_by_one(tokenizer, conversations):
    for conversation in conversations[:10]:
        ids = tokenizer.apply_chat_template(conversation["messages"], tokenize=True, return_dict=False)
        inputs, loss_inputs = flow(tokenizer, 1, seq_length=4096).collate_data_micro_batch(iter([conversation]))
        assert inputs["input_ids"][0].tolist() == ids[:-1]
        assert loss_inputs["labels"][0].tolist() == ids[1:]
        assert inputs["position_ids"][0].tolist() == list(range(len(ids) - 1))


@pytest.mark.parametrize("collate_type", ["fixed_length", "variable_length"])
def test_padding_is_on_the_right_and_not_counted(tokenizer, conversations, collate_type):
    pair = sorted(conversations[:6], key=lambda sample: len(str(sample)))[:2]
    made = flow(tokenizer, seq_length=512, collate_type=collate_type)
    inputs, loss_inputs = made.collate_data_micro_batch(iter(pair))
    lengths = [len(tokenizer.apply_chat_template(s["messages"], return_dict=False)) - 1 for s in pair]
    width = 512 if collate_type == "fixed_length" else max(lengths)
    for row, length in enumerate(lengths):
        assert inputs["attention_mask"][row].tolist() == [1] * length + [0] * (width - length)
        assert inputs["input_ids"][row, length:].tolist() == [tokenizer.pad_token_id] * (width - length)
        assert not loss_inputs["loss_mask"][row, length:].any()
    assert made.get_pad_values() == {"input_ids": tokenizer.pad_token_id}
    assert made.get_loss_weight(loss_inputs) == float(loss_inputs["loss_mask"].sum()) > 0


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_token(tokenizer):
    class NoPad:
        pad_token_id, eos_token_id = None, 7

    assert flow(NoPad()).get_pad_values() == {"input_ids": 7}
    assert flow(None).get_pad_values() == {"input_ids": 0}


def token_sample(count: int) -> dict[str, list[int]]:
    return {"input_ids": list(range(count)), "loss_mask": [0, *[1] * (count - 1)]}


@pytest.mark.parametrize(("rule", "kept"), [("right", range(0, 9)), ("left", range(3, 12))])
def test_a_long_sample_is_truncated_by_the_rule_and_counted(rule, kept):
    """seq_length inputs need seq_length + 1 tokens: twelve tokens lose three."""
    made = flow(seq_length=8, truncation=rule)
    inputs, loss_inputs = made.collate_data_micro_batch(iter([token_sample(12), token_sample(9)]))
    assert inputs["input_ids"].tolist() == [list(kept)[:-1], list(range(8))]
    assert loss_inputs["labels"].tolist() == [list(kept)[1:], list(range(1, 9))]
    assert loss_inputs["truncated"].tolist() == [1.0, 0.0]


def test_truncation_refuse_raises_for_a_long_sample():
    """Also when it is prepared, so that on_bad_sample: skip can leave it out."""
    made = flow(seq_length=8, truncation="refuse")
    for use in (made.prepare_sample, lambda sample: made.collate_data_micro_batch(iter([sample]))):
        with pytest.raises(DataError, match=r"12 tokens.* 9 "):
            use(token_sample(12))


class OneRank:
    size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)


@pytest.fixture
def one_rank(monkeypatch):
    """The operations of the loss without a process group."""
    for module in (cross_entropy_module, text_module):
        monkeypatch.setattr(module, "token_log_probs", lambda logits, ids, **_: token_log_probs(logits, ids, OneRank()))
    for function in (token_terms, log_probs_and_logsumexp):
        alone = partial(lambda operation, logits, ids: operation(logits, ids, OneRank()), function)
        monkeypatch.setattr(cross_entropy_module, function.__name__, alone)


@pytest.mark.parametrize("flow_class", [MegatronWrapGPTModelSFTFlow, MegatronWrapGPTModelPretrainFlow])
@pytest.mark.parametrize(("smoothing", "coefficient"), [(0.1, 0.0), (0.0, 1e-2), (0.3, 1e-2)])
def test_label_smoothing_and_z_loss_are_those_of_torch_and_transformers(flow_class, smoothing, coefficient, one_rank):
    """Over the true vocabulary of 20, of which the model pads 4 columns."""
    options = {"label_smoothing": smoothing, "z_loss_coefficient": coefficient}
    context = FlowContext(2, 8, 20, 1, lambda part: part, lambda value: value, None)
    made = flow_class(flow_class.Config(flow_key="key", **options), context)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 8, 20, generator=generator, requires_grad=True)
    labels = torch.randint(20, (2, 8), generator=generator)
    mask = torch.tensor([[1.0] * 8, [0.0] * 3 + [1.0] * 2 + [0.0] * 3])
    padded = pad(logits, (0, 4), value=torch.finfo(torch.float32).min / 2)
    loss_inputs = {"labels": labels, "loss_mask": mask, "truncated": torch.zeros(2)}
    output = made.calculate_loss(loss_inputs, padded)

    masked_labels = torch.where(mask == 1, labels, -100)
    flat, counted = logits.flatten(0, 1), mask.flatten() == 1
    z_loss = (flat.logsumexp(-1)[counted] ** 2).sum()
    of_torch = cross_entropy(flat, masked_labels.flatten(), label_smoothing=smoothing, reduction="sum")
    expected = of_torch + coefficient * z_loss
    torch.testing.assert_close(output.loss_sum, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (output.loss_sum, expected)))
    of_transformers = LabelSmoother(epsilon=smoothing)(ModelOutput(logits=logits), masked_labels) * 10
    torch.testing.assert_close(of_transformers, of_torch)

    metrics = output.metrics
    torch.testing.assert_close(
        metrics["nll_loss"][0], cross_entropy(flat, masked_labels.flatten(), reduction="sum").detach()
    )
    assert float(metrics["nll_loss"][1]) == 10
    assert ("logits_z_loss" in metrics) == bool(coefficient)
    if coefficient:
        torch.testing.assert_close(metrics["logits_z_loss"][0], z_loss.detach())


def test_loss_is_the_cross_entropy_of_the_masked_tokens(one_rank):
    made = flow(seq_length=8)
    _, loss_inputs = made.collate_data_micro_batch(iter([token_sample(12), token_sample(5)]))
    logits = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0), requires_grad=True)
    output = made.calculate_loss(loss_inputs, logits)
    labels = torch.where(loss_inputs["loss_mask"] == 1, loss_inputs["labels"], -100)
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(output.loss_sum, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (output.loss_sum, expected)))
    truncated = output.metrics["truncated_samples"]
    assert isinstance(truncated, Total)
    assert float(truncated.value) == 1.0
    log_probs = made.calculate_outputs(loss_inputs, logits.detach())["log_probs"]
    picked = logits.detach().log_softmax(dim=-1).gather(2, loss_inputs["labels"][..., None]).squeeze(-1)
    torch.testing.assert_close(log_probs, picked)
    assert made.get_fields_and_seqdims()["log_probs"] == 1


def test_a_weight_of_2_is_the_sample_twice(monkeypatch):
    """Of loss and loss weight; weight 0 removes a sample, even one whose loss is not finite."""
    monkeypatch.setattr(cross_entropy_module, "token_log_probs", lambda logits, ids, **_: logits)
    made = flow(seq_length=8, micro_batch_size=4)
    first, second, third = token_sample(9), token_sample(5), token_sample(7)
    log_probs = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))

    def loss_and_weight(samples: list[Any], rows: list[int], prepare: bool) -> tuple[float, float]:
        prepared = [made.prepare_sample(sample) if prepare else sample for sample in samples]
        _, loss_inputs = made.collate_data_micro_batch(iter(prepared))
        output = made.calculate_loss(loss_inputs, log_probs[rows, : loss_inputs["labels"].shape[1]])
        return float(output.loss_sum), made.get_loss_weight(loss_inputs)

    twice = loss_and_weight([first, second, second], [0, 1, 1], False)
    for prepare in (True, False):
        assert loss_and_weight([first, {**second, "weight": 2}], [0, 1], prepare) == pytest.approx(twice, abs=1e-5)
    log_probs[2] = -torch.inf
    without = loss_and_weight([first, second, second, {**third, "weight": 0}], [0, 1, 1, 2], True)
    assert without == pytest.approx(twice, abs=1e-5)


def test_loss_on_selects_the_last_answer_or_all_tokens(tokenizer, conversations):
    both = [*conversations[0]["messages"], *conversations[1]["messages"]]
    answers = [message["content"] for message in both if message["role"] == "assistant"]
    learned = {}
    for loss_on in ("assistant", "last_assistant", "all"):
        made = flow(tokenizer, 1, seq_length=4096, loss_on=loss_on)
        inputs, loss_inputs = made.collate_data_micro_batch(iter([made.prepare_sample({"messages": both})]))
        learned[loss_on] = loss_inputs["labels"][0][loss_inputs["loss_mask"][0] == 1].tolist()
    end = tokenizer.eos_token
    assert tokenizer.decode(learned["assistant"]).count(end) == len(answers) == 2
    assert tokenizer.decode(learned["last_assistant"]).strip() == answers[-1].strip() + end
    assert learned["all"] == [*inputs["input_ids"][0].tolist()[1:], loss_inputs["labels"][0, -1]]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_sample_too_short_to_predict_anything_is_all_padding(count):
    made, short = flow(seq_length=8), {"input_ids": [5] * count, "loss_mask": [1] * count}
    inputs, loss_inputs = made.collate_data_micro_batch(iter([token_sample(4), short]))
    predicted = max(count - 1, 0)
    assert inputs["attention_mask"].sum(dim=1).tolist() == [3, predicted]
    assert loss_inputs["loss_mask"].sum(dim=1).tolist() == [3, predicted]
