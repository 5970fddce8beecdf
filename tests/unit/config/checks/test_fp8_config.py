"""FP8 settings: from the YAML to Megatron-Core's fields, and what is refused before a process starts."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_wrap.config import RunConfig, load_run_config
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.schema.derived import token_multiple
from megatron_wrap.errors import ConfigError, PlatformError
from megatron_wrap.platform import choose_platform
from megatron_wrap.platform.base.machine import Machine

choose_platform("cpu").install()

from megatron_wrap.model.transformer_config import transformer_config  # noqa: E402

CONFIG = Path(__file__).resolve().parents[4] / "scripts/benchmark/llama-1b.yaml"
DTYPE, ARCH = "megatron_lm.train.dtype", "megatron_lm.model.arch"
DTYPE, ARCH = "megatron_lm.train.dtype", "megatron_lm.model.arch"
SECTIONS = {"dtype": DTYPE, "arch": ARCH, "optimizer": "megatron_lm.train.optimizer"}
GATHERED = "dtype.fp8_param_gather=true optimizer.use_distributed_optimizer=true"


def load(overrides: str) -> RunConfig:
    """load("dtype.fp8=hybrid arch.hidden_size=16"): the run with these keys."""
    split = [text.partition(".") for text in overrides.split()]
    return load_run_config(CONFIG, [f"{SECTIONS[section]}.{key}" for section, _, key in split])


class Gpu:
    """Stands for a platform with Transformer Engine that lacks nothing."""

    name, has_transformer_engine, device = "cuda", True, torch.device("cpu")
    machine = Machine("cuda", (2, 20, 2))

    def missing_for_fp8(self, recipe: str) -> str | None:
        return None

    def use_kernels(self, kernels: Any) -> None:
        pass

    def refuse_unsafe(self, settings: dict[str, Any], transformer_engine: bool) -> None:
        pass

    def transformer_config_settings(self, **layout: Any) -> dict[str, Any]:
        return {}


def built(config: RunConfig, training: bool = True) -> Any:
    arch = dataclasses.replace(config.arch, upstream={**config.arch.upstream, "apply_rope_fusion": False})
    config = dataclasses.replace(config, arch=arch)  # Megatron-Core looks for the kernel of Transformer Engine
    return transformer_config(config, Gpu(), training)  # type: ignore[arg-type]


FIELDS = ("fp8", "fp8_recipe", "fp8_param", "first_last_layers_bf16", "num_layers_at_end_in_bf16")


TENSORWISE = "dtype.fp8=hybrid dtype.fp8_recipe=tensorwise"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", (None, "delayed", False, False, 1)),
        ("dtype.fp8=hybrid", ("hybrid", "delayed", False, False, 1)),
        (f"dtype.fp8=e4m3 dtype.fp8_recipe=blockwise {GATHERED}", ("e4m3", "blockwise", True, False, 1)),
        (
            f"{TENSORWISE} dtype.first_last_layers_bf16=true dtype.num_layers_at_end_in_bf16=2",
            ("hybrid", "tensorwise", False, True, 2),
        ),
    ],
)
def test_settings_reach_megatron_core(overrides: str, expected: tuple[Any, ...]) -> None:
    config = load(overrides)
    check_values(config)
    actual = built(config)
    assert tuple(getattr(actual, name) for name in FIELDS) == expected
    assert token_multiple(config) == (16 if expected[0] else 1)


def test_a_model_that_is_not_trained_computes_in_bf16() -> None:
    actual = built(load(f"dtype.fp8=hybrid {GATHERED}"), training=False)
    assert (actual.fp8, actual.fp8_param, actual.bf16) == (None, False, True)


OFFLOADED = "optimizer.optimizer_cpu_offload=true optimizer.use_precision_aware_optimizer=true"


def test_sizes_are_those_of_one_tensor_parallel_process() -> None:
    config = load("dtype.fp8=hybrid")
    check_values(config)
    parallel = dataclasses.replace(config.parallel, tensor_model_parallel_size=8)
    check_values(dataclasses.replace(config, parallel=parallel))  # 8192 / 8 and 3072 / 8 are multiples of 16
    arch = dataclasses.replace(config.arch, ffn_hidden_size=8256)  # 8256 is a multiple of 16, 8256 / 8 is not
    check_values(dataclasses.replace(config, arch=arch))
    with pytest.raises(ConfigError, match="8256 over 8 tensor-parallel"):
        check_values(dataclasses.replace(config, arch=arch, parallel=parallel))


def test_a_cpu_is_refused() -> None:
    config = load("dtype.fp8=hybrid")
    with pytest.raises(PlatformError) as raised:
        transformer_config(config, choose_platform("cpu"))
    assert all(fact in str(raised.value) for fact in (f"{DTYPE}.fp8", "hybrid", "delayed", "GPU", "cpu"))
