"""Keys that the YAML leaves open: values on mocked machines and layouts, and what takes precedence."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.config import RunConfig, load_run_config
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.defaults import (
    FUSED_CLIPPING,
    GRAPHS,
    LAYERS,
    OVERLAPPED_COMMUNICATION,
    all_choices,
    choices,
    cuda_connections,
    experts_choice,
    kernel_choices,
    with_choices,
)
from megatron_wrap.config.schema import derived
from megatron_wrap.platform.base.machine import Machine

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
OPTIMIZER, DDP, PARALLEL = "megatron_lm.train.optimizer", "megatron_lm.misc.ddp", "megatron_lm.model.parallel"
ARCH = "megatron_lm.model.arch"
GPU = Machine("cuda", (2, 20, 2), (0, 19, 2), triton=True, weight_gradients=True)
PLAIN_GPU = Machine("cuda", None, (0, 19, 2), triton=True, weight_gradients=True)
OLD_GPU = Machine("cuda", None, triton=False, weight_gradients=False)
CPU = Machine("cpu", None, weight_gradients=False)


def load(*overrides: str, run: str = "tiny-llama-mock") -> RunConfig:
    return load_run_config(CONFIGS / f"{run}.yaml", overrides)


def values(config: RunConfig, machine: Machine, shards: int, **further: Any) -> dict[str, Any]:
    check_values(config)
    return {choice.key: choice.value for choice in choices(config, machine, shards, **further)}


def data_parallel(config: RunConfig, machine: Machine, shards: int, **further: Any) -> tuple[Any, Any, Any]:
    """Distributed optimizer, overlapped reduction, overlapped gather, given or chosen."""
    actual = with_choices(config, choices(config, machine, shards, **further))
    check_values(actual)
    return actual.optimizer.use_distributed_optimizer, actual.ddp.overlap_grad_reduce, actual.ddp.overlap_param_gather


@pytest.mark.parametrize(
    ("overrides", "machine", "shards", "expected"),
    [
        ((), GPU, 8, (True, True, True)),
        ((), PLAIN_GPU, 2, (True, True, True)),
        ((), GPU, 1, (False, False, False)),
        ((), CPU, 8, (False, False, False)),
        ((f"{PARALLEL}.pipeline_model_parallel_size=2",), GPU, 4, (True, True, True)),
        (("megatron_lm.train.dtype.__select__=fp16",), GPU, 4, (True, True, True)),
        ((f"{OPTIMIZER}.__select__=sgd",), GPU, 8, (False, True, False)),
        ((f"{OPTIMIZER}.__select__=muon",), GPU, 8, (False, True, False)),
        ((f"{OPTIMIZER}.use_distributed_optimizer=false",), GPU, 8, (False, True, False)),
        ((f"{OPTIMIZER}.use_distributed_optimizer=true",), CPU, 8, (True, False, False)),
        ((f"{DDP}.overlap_grad_reduce=false",), GPU, 8, (True, False, False)),
        ((f"{DDP}.overlap_param_gather=false",), GPU, 8, (True, True, False)),
        ((f"{DDP}.overlap_param_gather=true",), CPU, 2, (True, True, True)),
        ((f"{OPTIMIZER}.use_precision_aware_optimizer=true",), GPU, 1, (True, False, False)),
        (("megatron_wrap.model_provider.provider_key=my_module:my_provider",), GPU, 8, (True, False, False)),
    ],
)
def test_data_parallelism(
    overrides: tuple[str, ...], machine: Machine, shards: int, expected: tuple[bool, bool, bool]
) -> None:
    assert data_parallel(load(*overrides), machine, shards) == expected


@pytest.mark.parametrize(("shards", "size"), [(2, 40_000_000), (64, 64_000_000)])
def test_buckets_have_the_size_of_megatron_core(shards: int, size: int) -> None:
    assert values(load(), GPU, shards)["ddp.ddp_bucket_size"] == size
    assert "ddp.ddp_bucket_size" not in values(load(f"{DDP}.ddp_bucket_size=7"), GPU, shards)
    assert "ddp.ddp_bucket_size" not in values(load(), GPU, 1)  # nothing is overlapped


def test_fp8_weights_need_the_distributed_optimizer() -> None:
    fp8 = [f"megatron_lm.train.dtype.{text}" for text in ("__select__=bf16", "fp8=hybrid", "fp8_param_gather=true")]
    config = load(*fp8, f"{ARCH}.ffn_hidden_size=768")
    assert data_parallel(config, GPU, 1) == (True, False, False)
    assert data_parallel(config, GPU, 8) == (True, True, True)
    older = dataclasses.replace(GPU, megatron_core=(0, 16, 1))
    assert data_parallel(config, older, 8) == (True, True, False)


def test_a_resumed_run_keeps_the_values_of_its_checkpoint() -> None:
    before = {
        "optimizer.use_distributed_optimizer": False,
        "ddp.overlap_grad_reduce": False,
        "ddp.overlap_param_gather": False,
    }
    assert data_parallel(load(), GPU, 8, saved=before) == (False, False, False)
    only_kind = {"optimizer.use_distributed_optimizer": False}  # of a checkpoint on another layout
    assert data_parallel(load(), GPU, 8, saved=only_kind) == (False, True, False)
    assert data_parallel(load(), GPU, 1, saved={"optimizer.use_distributed_optimizer": True}) == (True, False, False)
    overridden = load(f"{OPTIMIZER}.use_distributed_optimizer=true")
    assert data_parallel(overridden, GPU, 8, saved=only_kind)[0] is True


def test_the_resolved_tree_and_the_sources_have_the_values() -> None:
    config = load()
    actual = with_choices(config, choices(config, GPU, 8))
    assert actual.resolved["megatron_lm"]["train"]["optimizer"]["use_distributed_optimizer"] is True
    assert config.resolved["megatron_lm"]["train"]["optimizer"]["use_distributed_optimizer"] is None
    assert "8 processes" in str(actual.origins[f"{OPTIMIZER}.use_distributed_optimizer"])


@pytest.mark.parametrize(
    ("sizes", "variable", "expected"),
    [
        ({}, None, "32"),
        ({"tensor_model_parallel_size": 2}, None, "1"),
        ({"context_parallel_size": 2}, None, "1"),
        ({"pipeline_model_parallel_size": 2}, None, "32"),
        ({"tensor_model_parallel_size": 2}, "8", "8"),
        ({}, "1", "1"),
    ],
)
def test_queues_of_a_gpu(sizes: dict[str, int], variable: str | None, expected: str) -> None:
    config = load(*(f"{PARALLEL}.{name}={size}" for name, size in sizes.items()))
    assert cuda_connections(config, GPU, variable).value == expected


KERNELS = ("arch.apply_rope_fusion", "arch.bias_activation_fusion", "arch.gradient_accumulation_fusion")


@pytest.mark.parametrize(
    ("overrides", "machine", "transformer_engine", "expected"),
    [
        ((), GPU, True, (True, True, True)),
        ((), PLAIN_GPU, False, (True, True, True)),
        ((), OLD_GPU, False, (False, True, False)),
        ((), CPU, False, (False, True, False)),
        ((f"{ARCH}.swiglu=false", f"{ARCH}.position_embedding_type=learned_absolute"), GPU, True, (None, False, True)),
    ],
)
def test_fused_kernels(
    overrides: tuple[str, ...], machine: Machine, transformer_engine: bool, expected: tuple[bool | None, ...]
) -> None:
    actual = {choice.key: choice for choice in kernel_choices(load(*overrides).arch, machine, transformer_engine)}
    assert tuple(actual[key].value if key in actual else None for key in KERNELS) == expected
    assert actual.keys() <= {*KERNELS}
    assert all(choice.reason for choice in actual.values())


@pytest.mark.parametrize(
    ("overrides", "fp8", "expected"),
    [
        ((), False, "grouped_mm"),
        ((), True, "transformer_engine"),
        ((f"{ARCH}.moe_grouped_gemm=false",), False, "sequential"),
        ((f"{ARCH}.moe_grouped_gemm=true",), False, "transformer_engine"),
        ((f"{ARCH}.experts_impl=sequential",), False, "sequential"),
    ],
)
def test_experts(overrides: tuple[str, ...], fp8: bool, expected: str) -> None:
    arch = load("megatron_wrap.init.platform=cuda", *overrides, run="tiny-mixtral-sft").arch
    choice = experts_choice(arch, fp8)
    assert (choice.key, choice.value) == ("arch.experts_impl", expected)
    assert choice.reason


TP2 = f"{PARALLEL}.tensor_model_parallel_size=2"
MEASURED = (
    *(TP2, "megatron_lm.train.dtype.__select__=bf16", f"{ARCH}.transformer_impl=torch", f"{ARCH}.hidden_size=2048"),
    *("megatron_lm.train.common.seq_length=4096", f"{ARCH}.max_position_embeddings=4096"),
    *(f"megatron_lm.train.common.{size}_batch_size=4" for size in ("micro", "global")),
)


@pytest.mark.parametrize(
    ("overrides", "machine", "expected"),
    [
        (MEASURED, GPU, True),
        (MEASURED, PLAIN_GPU, True),
        (MEASURED, CPU, False),
        ((*MEASURED, "megatron_lm.train.common.micro_batch_size=2"), GPU, False),
        ((*MEASURED, f"{PARALLEL}.tensor_model_parallel_size=4"), GPU, False),
        ((*MEASURED, f"{PARALLEL}.context_parallel_size=2"), GPU, False),
        ((*MEASURED, f"{PARALLEL}.sequence_parallel=false"), GPU, False),
        ((*MEASURED, f"{ARCH}.transformer_impl=transformer_engine"), GPU, False),
        ((*MEASURED, "megatron_lm.train.dtype.__select__=fp32"), GPU, False),
        ((*MEASURED, f"{PARALLEL}.tp_comm_overlap=true"), CPU, None),  # kept
        ((*MEASURED, f"{PARALLEL}.tensor_model_parallel_size=1"), GPU, None),
    ],
)
def test_communication_of_tensor_parallelism_is_hidden_from_the_measured_size_on(
    overrides: tuple[str, ...], machine: Machine, expected: bool | None
) -> None:
    assert values(load(*overrides), machine, 1).get(OVERLAPPED_COMMUNICATION) == expected


@pytest.mark.parametrize(
    ("overrides", "machine", "expected"),
    [
        ((), GPU, True),
        ((), OLD_GPU, False),  # without Triton
        ((), CPU, False),
        ((f"{OPTIMIZER}.clip_grad=0",), GPU, False),
        ((f"{OPTIMIZER}.__select__=muon",), GPU, False),
        ((f"{OPTIMIZER}.use_precision_aware_optimizer=true",), GPU, False),
        ((f"{OPTIMIZER}.fused_clipping=false",), GPU, None),  # kept
    ],
)
def test_adam_clips_on_gpus_with_triton(overrides: tuple[str, ...], machine: Machine, expected: bool | None) -> None:
    assert values(load(*overrides), machine, 1).get(FUSED_CLIPPING) is expected


FIXED = (*MEASURED, f"{ARCH}.transformer_impl=auto", "megatron_wrap.flow.collate_type=fixed_length")
ALONE = (f"{PARALLEL}.tensor_model_parallel_size=1", f"{PARALLEL}.sequence_parallel=null")
CP2, GATHER = f"{PARALLEL}.context_parallel_size=2", f"{PARALLEL}.cp_comm_type=all_gather"
CONTEXT = (*FIXED, *ALONE, CP2)
EXPERTS = (
    *(*FIXED, *ALONE, f"{PARALLEL}.expert_model_parallel_size=2", f"{ARCH}.num_experts=8"),
    *(f"{ARCH}.moe_router_topk=2", f"{ARCH}.moe_ffn_hidden_size=64"),
)


@pytest.mark.parametrize(
    ("overrides", "machine", "layers", "graphs", "queues"),
    [
        (FIXED, GPU, "torch", "local", "8"),
        ((*FIXED, "megatron_lm.train.common.micro_batch_size=1"), GPU, "torch", "local", "8"),
        (FIXED, PLAIN_GPU, None, "local", "8"),
        (FIXED, dataclasses.replace(GPU, megatron_core=(0, 16, 1)), "torch", None, "8"),
        ((*FIXED, "megatron_wrap.flow.collate_type=dynamic_length"), GPU, "torch", None, "8"),
        ((*FIXED, "megatron_lm.train.recompute.recompute_granularity=selective"), GPU, "torch", None, "8"),
        ((*FIXED, f"{ARCH}.cuda_graph_impl=none"), GPU, "torch", None, "8"),
        ((*FIXED, f"{ARCH}.transformer_impl=transformer_engine"), GPU, None, None, "1"),
        ((*FIXED, "megatron_lm.train.dtype.fp8=hybrid"), GPU, None, None, "1"),
        ((*FIXED, "megatron_lm.train.dtype.__select__=fp32"), GPU, None, None, "1"),
        ((*FIXED, f"{PARALLEL}.tp_comm_overlap=false"), GPU, "torch", "local", "1"),
        ((*FIXED, *ALONE), GPU, None, None, "32"),
        (FIXED, CPU, None, None, "1"),
        (CONTEXT, GPU, "torch", "local", "8"),
        ((*CONTEXT, GATHER), GPU, "torch", "local", "1"),
        ((*CONTEXT, "megatron_wrap.flow.collate_type=dynamic_length"), GPU, None, None, "1"),
        ((*FIXED, CP2), GPU, "torch", "local", "8"),
        ((*FIXED, CP2, f"{PARALLEL}.tp_comm_overlap=false"), GPU, "torch", "local", "1"),
        ((*CONTEXT, f"{PARALLEL}.pipeline_model_parallel_size=2"), GPU, None, None, "1"),
        ((*CONTEXT, f"{ARCH}.cuda_graph_impl=local", GATHER), GPU, "torch", "local", "1"),
        (EXPERTS, GPU, "torch", "local", "32"),
        ((*EXPERTS, f"{PARALLEL}.expert_model_parallel_size=1"), GPU, None, None, "32"),
        ((*EXPERTS, "megatron_wrap.flow.collate_type=dynamic_length"), GPU, "torch", None, "32"),
        ((*EXPERTS, f"{ARCH}.moe_expert_capacity_factor=1.0"), GPU, "torch", None, "32"),
        ((*EXPERTS, "megatron_lm.train.common.router_replay=R3"), GPU, "torch", None, "32"),
        ((*EXPERTS, f"{PARALLEL}.tensor_model_parallel_size=2"), GPU, None, None, "1"),
        ((*EXPERTS, "megatron_lm.train.dtype.__select__=fp32"), GPU, None, None, "32"),
    ],
)
def test_layers_and_graphs_of_divided_layers_are_the_fastest_measured(
    overrides: tuple[str, ...], machine: Machine, layers: str | None, graphs: str | None, queues: str
) -> None:
    config = load(*overrides, run="tiny-llama-sft")
    chosen = values(config, machine, 1)
    configured = config.arch.upstream.get("cuda_graph_impl")
    assert (chosen.get(LAYERS), chosen.get(GRAPHS, configured if configured != "none" else None)) == (layers, graphs)
    assert cuda_connections(config, machine, None).value == queues
    decided = with_choices(config, choices(config, machine, 1))
    assert derived.captures_graphs(decided.arch) == (graphs == "local")
    check_values(decided)


def test_a_resumed_run_keeps_its_layers() -> None:
    assert LAYERS not in values(load(*FIXED, run="tiny-llama-sft"), GPU, 1, saved={LAYERS: "auto"})
    assert values(load(*FIXED, run="tiny-llama-sft"), GPU, 1, saved={LAYERS: "torch"})[LAYERS] == "torch"


@pytest.mark.parametrize("saved", [True, False])
def test_a_resumed_run_hides_communication_as_its_checkpoint(saved: bool) -> None:
    for further in ((), ("megatron_lm.train.common.micro_batch_size=2",)):
        chosen = values(load(*MEASURED, *further), GPU, 1, saved={OVERLAPPED_COMMUNICATION: saved})
        assert chosen[OVERLAPPED_COMMUNICATION] == saved
    alone = values(
        load(*MEASURED, f"{PARALLEL}.sequence_parallel=false"), GPU, 1, saved={OVERLAPPED_COMMUNICATION: saved}
    )
    assert alone[OVERLAPPED_COMMUNICATION] is False


def test_explain_leaves_out_what_the_yaml_gives() -> None:
    config = load(f"{ARCH}.apply_rope_fusion=false", f"{ARCH}.transformer_impl=torch")
    keys = {choice.key for choice in all_choices(config, GPU, 8, None)}
    assert "arch.transformer_impl" not in keys
    assert "arch.apply_rope_fusion" not in keys
    assert {"parallel.sequence_parallel", "ddp.overlap_grad_reduce", "CUDA_DEVICE_MAX_CONNECTIONS"} <= keys
