"""Collation and options of gpt_distill."""

from typing import Any

import pytest

from megatron_wrap.errors import DataError
from megatron_wrap.flow import FlowContext
from megatron_wrap.flow.distill import MegatronWrapGPTModelDistillFlow as Flow


def sample(count: int, **more: Any) -> dict[str, Any]:
    """Tokens 0 to count - 1, and the teacher's largest logit of each label, which is the label itself."""
    labels = list(range(1, count))
    teacher_keys = {
        "teacher_top_k_logits": [[float(label)] for label in labels],
        "teacher_top_k_ids": [[label] for label in labels],
    }
    return {"input_ids": list(range(count)), "loss_mask": [1] * count, **teacher_keys, **more}


def collated(truncation: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    context = FlowContext(len(samples), 6, 20, 1, lambda part: part, lambda value: value, None)
    made = Flow(Flow.Config(flow_key="gpt_distill", truncation=truncation), context)
    return made.collate_data_micro_batch(iter([made.prepare_sample(prepared) for prepared in samples]))[1]


@pytest.mark.parametrize("truncation", ["right", "left"])
def test_the_logits_of_a_truncated_sample_are_those_of_its_labels(truncation):
    result = collated(truncation, [sample(10), sample(4)])
    labels, mask = result["labels"], result["loss_mask"] != 0
    assert mask.sum().tolist() == 6 + 3
    assert (result["teacher_top_k_ids"].squeeze(-1)[mask] == labels[mask]).all()
    assert (result["teacher_top_k_logits"].squeeze(-1)[mask] == labels[mask].float()).all()


@pytest.mark.parametrize("missing", ["teacher_top_k_ids", "teacher_top_k_logits"])
def test_half_of_a_teacher_is_refused(missing):
    teacher_sample = sample(4)
    del teacher_sample[missing]
    with pytest.raises(DataError, match="only some samples contain teacher_top_k_logits and teacher_top_k_ids"):
        collated("right", [sample(4), teacher_sample])
