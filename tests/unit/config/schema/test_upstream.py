"""Megatron-Core's fields as read from its files, against its own dataclasses."""

import dataclasses

import pytest

from megatron_wrap.config.decode import section_hints
from megatron_wrap.config.schema.keys import parse_annotation
from megatron_wrap.config.schema.run import UPSTREAM
from megatron_wrap.config.schema.upstream import set_elsewhere, upstream_enums, upstream_fields
from megatron_wrap.platform import choose_platform

choose_platform("cpu").install()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402

CLASSES = [TransformerConfig, OptimizerConfig, DistributedDataParallelConfig]


@pytest.mark.parametrize("theirs", CLASSES, ids=lambda theirs: theirs.__name__)
def test_names_and_simple_defaults_are_those_of_the_dataclass(theirs: type) -> None:
    real = {field.name: field for field in dataclasses.fields(theirs) if not field.name.startswith("_")}
    read = upstream_fields(theirs.__name__)
    assert set(read) == set(real)
    for name, field in real.items():
        if isinstance(field.default, (int, float, str, bool)) and not hasattr(field.default, "name"):
            assert eval(read[name].default or "", {}) == field.default, name


def test_annotations_that_a_yaml_can_give() -> None:
    fields = upstream_fields("TransformerConfig")
    assert parse_annotation(fields["num_moe_experts"].annotation) == int | None
    assert parse_annotation(fields["window_size"].annotation) == tuple[int, int] | None
    assert parse_annotation(fields["moe_layer_freq"].annotation) == int | list[int]
    assert parse_annotation(fields["attention_backend"].annotation) is None
    assert parse_annotation(fields["init_method"].annotation) is None
    assert fields["qk_l2_norm"].doc == "Whether to apply llama 4-style qk L2 norm."
    unreadable = {name for name, field in fields.items() if parse_annotation(field.annotation) is None}
    assert {"params_dtype", "activation_func", "attention_backend"} <= unreadable
    assert not unreadable & {"moe_aux_loss_coeff", "cp_comm_type", "fp8", "recompute_modules"}


def test_enums_are_those_of_the_module() -> None:
    read = upstream_enums()
    assert read["AttnBackend"] == tuple(AttnBackend.__members__)
    assert {"AttnMaskType", "LayerType", "ModelType"} <= set(read)
    for theirs in CLASSES:  # a name becomes a member where the default is one (model/transformer.py)
        fields = upstream_fields(theirs.__name__)
        for field in dataclasses.fields(theirs):
            if field.name in fields and fields[field.name].annotation in read:
                assert theirs is TransformerConfig
                assert type(field.default).__name__ == fields[field.name].annotation


@pytest.mark.parametrize("section", sorted(UPSTREAM))
def test_advice_names_real_fields_and_real_keys(section: str) -> None:
    """A rename of Megatron-Core's must not leave dead advice; fields of one version alone are listed here."""
    one_version_only = {
        "moe_grad_scale_func",
        "mtp_grad_scale_func",
        *("mtp_use_repeated_layer", "mtp_detach_heads", "mtp_hybrid_override_pattern"),
        "experimental_attention_variant_loss_scale_func",
    }
    known = set(upstream_fields(UPSTREAM[section])) | one_version_only
    assert set(set_elsewhere(section)) <= known
    assert not set(set_elsewhere(section)) & set(section_hints(section))
