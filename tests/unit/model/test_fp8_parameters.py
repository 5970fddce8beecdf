"""Values of FP8 parameters, with a stand-in for Transformer Engine's tensors that keeps multiples of 1/16."""

import pytest
import torch
from torch import Tensor

from megatron_wrap.model.fp8_parameters import in_high_precision, is_quantized, writable
from megatron_wrap.platform import choose_platform


class Coarse(Tensor):
    """Holds rounded values; a part of it cannot be written."""

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.copy_(self, (source * 16).round() / 16)

    def __setitem__(self, index: object, value: object) -> None:
        raise AssertionError("a part of a quantized tensor was written")


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    choose_platform("cpu").install()
    import megatron.core.fp8_utils as fp8_utils

    monkeypatch.setattr(fp8_utils, "is_float8tensor", lambda tensor: isinstance(tensor, Coarse))
    monkeypatch.setattr(fp8_utils, "dequantize_fp8_tensor", lambda tensor: tensor.detach().clone().as_subclass(Tensor))
    return torch.zeros(4, 4).as_subclass(Coarse)


def test_parts_are_written_through_a_copy(quantized: Tensor) -> None:
    initial = torch.full((4, 4), 9.0)
    quantized.get_high_precision_init_val = lambda: initial  # type: ignore[attr-defined]
    values = torch.linspace(0, 1, 16).view(4, 4)
    with writable(quantized) as copy:
        assert not is_quantized(copy)
        copy[:2] = values[:2]
        copy[2:] = values[2:]
    torch.testing.assert_close(in_high_precision(quantized), (values * 16).round() / 16, rtol=0, atol=0)
    torch.testing.assert_close(initial, values, rtol=0, atol=0)  # what the optimizer's fp32 copy begins with


def test_other_tensors_are_written_themselves(quantized: Tensor) -> None:
    plain = torch.zeros(3)
    with writable(plain) as result:
        assert result is plain
    assert in_high_precision(plain) is plain
