"""Values that follow from a configuration; nothing here validates them."""

import ast
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_wrap.config.reading.pipeline_layout import PipelineLayout, parse_layout
from megatron_wrap.config.schema.data import DataConfig, SourceConfig
from megatron_wrap.config.schema.model import ArchConfig, ParallelConfig
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.config.schema.training import OptimConfig

VALUE_PROVIDER = "gpt_value_model"
"""Key of the model provider that builds a scalar head instead of the output layer."""
_MAX_LAYERS = 10_000


def has_value_head(config: RunConfig) -> bool:
    """Whether the model returns one value for each token instead of logits."""
    return config.model_provider.provider_key == VALUE_PROVIDER


def saves_adapter_alone(config: RunConfig) -> bool:
    """Whether the run's checkpoints contain only its adapter, because the frozen weights are those of hf_path."""
    adapter, hf_path = config.adapter, config.model_provider.hf_path
    return adapter.adapter_type != "none" and not adapter.keep_base and hf_path is not None


def ffn_hidden_size(arch: ArchConfig) -> int:
    """Inner width of the MLP, by default 4 * hidden_size; with swiglu 8/3 of it, down to a multiple of 64 (the rule of
    Megatron-LM's megatron/training/arguments.py)."""
    if arch.ffn_hidden_size is not None:
        return arch.ffn_hidden_size
    return int((4 * arch.hidden_size * 2 / 3) / 64) * 64 if arch.swiglu else 4 * arch.hidden_size


def num_query_groups(arch: ArchConfig) -> int:
    """Key and value heads of a layer."""
    return arch.num_attention_heads if arch.num_query_groups is None else arch.num_query_groups


def kv_channels(arch: ArchConfig) -> int:
    """Width of one head."""
    return arch.hidden_size // arch.num_attention_heads if arch.kv_channels is None else arch.kv_channels


def is_gated(arch: ArchConfig) -> bool:
    """Whether the first layer of an MLP has a gate in addition to its linear part."""
    return arch.swiglu or arch.geglu or arch.quick_geglu


def trained_prediction_layers(arch: ArchConfig) -> int:
    """Number of layers for multi-token prediction that are trained; those with loss coefficient 0 are only kept."""
    return (arch.mtp_num_layers or 0) if arch.mtp_loss_scaling_factor else 0


def has_plain_yarn(arch: ArchConfig) -> bool:
    """Whether queries and keys have YaRN's rotary embedding, outside of multi-latent attention."""
    return arch.rope_type == "yarn" and not arch.multi_latent_attention


def scales_rotary(arch: ArchConfig) -> bool:
    """Whether attention multiplies the rotated parts of queries and keys, outside of multi-latent attention."""
    return has_plain_yarn(arch) or arch.rope_type == "longrope"


def longrope_factors(arch: ArchConfig, seq_length: int) -> tuple[float, ...] | None:
    """LongRoPE's factors for sequences of up to `seq_length` tokens; None without LongRoPE."""
    if arch.rope_type != "longrope":
        return None
    is_long = seq_length > arch.original_max_position_embeddings
    return arch.longrope_long_factor if is_long else arch.longrope_short_factor


def moe_ffn_hidden_size(arch: ArchConfig) -> int:
    """Inner width of one expert, by default the dense MLP's."""
    return ffn_hidden_size(arch) if arch.moe_ffn_hidden_size is None else arch.moe_ffn_hidden_size


def moe_layer_pattern(arch: ArchConfig) -> tuple[int, ...]:
    """Per layer, 1 if it has experts, else 0; raises ValueError or SyntaxError for an invalid moe_layer_freq, and
    MemoryError or RecursionError for a deeply nested one."""
    frequency = arch.moe_layer_freq
    if arch.num_experts is None:
        return (0,) * arch.num_layers
    if isinstance(frequency, int):
        return tuple(int(layer % frequency == 0) for layer in range(arch.num_layers))
    if isinstance(frequency, str):
        return tuple(_list_of(ast.parse(frequency.strip(), mode="eval").body))
    return tuple(frequency)


def window_layer_pattern(arch: ArchConfig) -> tuple[int, ...]:
    """Per layer, 1 if it has the sliding window, else 0."""
    frequency = arch.window_attn_skip_freq
    if arch.window_size is None:
        return (0,) * arch.num_layers
    if frequency is None or isinstance(frequency, int):
        return tuple(int(frequency is None or (layer + 1) % frequency != 0) for layer in range(arch.num_layers))
    return frequency


def linear_layer_pattern(arch: ArchConfig) -> tuple[int, ...]:
    """Per layer, 1 if it has linear attention, else 0."""
    frequency = arch.linear_attention_freq
    if arch.experimental_attention_variant is None or frequency is None:
        return (0,) * arch.num_layers
    if isinstance(frequency, int):
        return tuple(int((layer + 1) % frequency != 0) for layer in range(arch.num_layers))
    return frequency


def _list_of(node: ast.expr) -> list[int]:
    """The value of a sum of lists and of multiples of lists, the form of Megatron-LM's --moe-layer-freq."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _list_of(node.left) + _list_of(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        repeated, times = (node.left, node.right) if isinstance(node.left, ast.List) else (node.right, node.left)
        count = ast.literal_eval(times)
        items = _list_of(repeated)
        if type(count) is int and len(items) * count <= _MAX_LAYERS:
            return items * count
    if isinstance(node, ast.List):
        items = [ast.literal_eval(item) for item in node.elts]
        if all(type(item) is int for item in items):
            return items
    raise ValueError("a sum of lists and of their multiples is expected")


def expert_tensor_parallel_size(parallel: ParallelConfig) -> int:
    """Processes that share the matrices of one expert."""
    size = parallel.expert_tensor_parallel_size
    return parallel.tensor_model_parallel_size if size is None else size


def load_balancing_coefficients(arch: ArchConfig) -> dict[str, float]:
    """Auxiliary losses of the experts' routers with a coefficient above 0: type -> coefficient."""
    if arch.num_experts is None:
        return {}
    kinds, coefficients = arch.moe_router_load_balancing_type, arch.moe_aux_loss_coeff
    pairs = zip(
        (kinds,) if isinstance(kinds, str) else kinds,
        coefficients if isinstance(coefficients, tuple) else (coefficients,),
        strict=False,
    )
    return {kind: value for kind, value in pairs if value and kind not in ("sinkhorn", "none")}


def max_position_embeddings(arch: ArchConfig, seq_length: int) -> int:
    """Longest sequence of the model in tokens, by default that of the run."""
    return seq_length if arch.max_position_embeddings is None else arch.max_position_embeddings


def sequence_parallel(parallel: ParallelConfig) -> bool:
    """Whether sequence parallelism is on, by default if TP > 1."""
    is_on = parallel.sequence_parallel
    return parallel.tensor_model_parallel_size > 1 if is_on is None else is_on


def replica_processes(config: RunConfig) -> int:
    """Processes of one model replica, TP * PP * CP."""
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def data_parallel_size(config: RunConfig, world_size: int) -> int:
    """Model replicas among `world_size` processes."""
    return world_size // replica_processes(config)


def processes_needed(config: RunConfig) -> int:
    """The fewest processes that can run the configuration: whole replicas of the model and of its experts."""
    replica = replica_processes(config)
    return replica if config.arch.num_experts is None else math.lcm(replica, expert_processes(config.parallel))


def expert_processes(parallel: ParallelConfig) -> int:
    """Processes of one replica of the expert layers, ETP * EP * PP."""
    expert_tensor = expert_tensor_parallel_size(parallel)
    return expert_tensor * parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size


def attention_heads_of_process(config: RunConfig) -> tuple[int, int]:
    """(query heads, key and value heads) of one tensor-parallel process."""
    arch, tensor = config.arch, config.parallel.tensor_model_parallel_size
    groups = arch.num_attention_heads if arch.multi_latent_attention else num_query_groups(arch)
    return arch.num_attention_heads // tensor, groups // tensor


def exchanged_groups(config: RunConfig) -> int | None:
    """Key and value heads that a process sends in an exchange of heads (`cp_comm_type: a2a`). Each head is sent once,
    or, if there are fewer heads than context-parallel processes, to all processes that have its queries. None: the
    heads cannot be shared equally."""
    heads, groups = attention_heads_of_process(config)
    size = config.parallel.context_parallel_size
    if heads % size or (groups % size and size % groups):
        return None
    return max(groups, size)


def pipeline_layout(config: RunConfig) -> PipelineLayout | None:
    """The pipeline layout that the configuration names, which must be legal (see `checks`); None: it names none."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_layout is None:
        return None
    stages = parallel.pipeline_model_parallel_size
    return parse_layout(parallel.pipeline_model_parallel_layout, config.arch.num_layers, stages)


def splits_by_cost(config: RunConfig) -> bool:
    """Whether the run chooses the layers of its stages, because no key sets numbers of layers."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size == 1 or parallel.pipeline_split == "even":
        return False
    numbers = (
        *(parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers),
        *(parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_layout),
    )
    return not accounts_for_ends(config) and all(number is None for number in numbers)


def accounts_for_ends(config: RunConfig) -> bool:
    """Whether Megatron-Core's split counts the embedding or the loss as a layer."""
    return any(config.arch.upstream.get(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss"))


def layers_per_stage(config: RunConfig) -> list[int]:
    """Layers on each pipeline stage, first to last; the split must be legal (see `checks`), and decided."""
    parallel, stages = config.parallel, config.parallel.pipeline_model_parallel_size
    layout = pipeline_layout(config)
    if layout is not None:
        return list(layout.layers_per_stage)
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    middle_stages = stages - (first is not None) - (last is not None)
    middle_layers = config.arch.num_layers - (first or 0) - (last or 0)
    middle = [middle_layers // middle_stages] * middle_stages if middle_stages > 0 else []
    return ([] if first is None else [first]) + middle + ([] if last is None else [last])


def virtual_pipeline_size(config: RunConfig) -> int | None:
    """Model chunks on each pipeline stage, from either of the two keys; None if the pipeline is not interleaved."""
    parallel = config.parallel
    chunks, layout = parallel.virtual_pipeline_model_parallel_size, pipeline_layout(config)
    if layout is not None:
        chunks = layout.chunks_per_stage
    elif chunks is None and parallel.num_layers_per_virtual_pipeline_stage is not None:
        layers = config.arch.num_layers // parallel.pipeline_model_parallel_size
        chunks = layers // parallel.num_layers_per_virtual_pipeline_stage
    return chunks if chunks is not None and chunks > 1 else None


def train_iters(config: RunConfig) -> int:
    """Optimizer steps of the whole run; with train_epochs only after the setup has counted them."""
    if config.train.train_iters is None and config.train.train_samples is not None:
        return iterations_of_samples(config, config.train.train_samples)
    assert config.train.train_iters is not None, "the setup of a run derives train_iters from train_epochs"
    return config.train.train_iters


def lr_decay_iters(config: RunConfig) -> int:
    """Iterations until the learning rate reaches its floor."""
    steps = config.learning_rate.lr_decay_iters
    return train_iters(config) if steps is None else steps


def lr_warmup_iters(config: RunConfig) -> float:
    """Iterations of warm-up; with lr_warmup_fraction possibly fractional, as in Megatron-LM."""
    fraction = config.learning_rate.lr_warmup_fraction
    return config.learning_rate.lr_warmup_iters if fraction is None else fraction * lr_decay_iters(config)


def global_batch_sizes(config: RunConfig) -> list[int]:
    """Every global batch size of the run: the ramp-up's steps, then train.common.global_batch_size."""
    ramp, final = config.train.rampup_batch_size, config.train.global_batch_size
    return [final] if ramp is None else [*range(ramp[0], final, ramp[1]), final]


def global_batch_size_at(config: RunConfig, consumed_samples: int) -> int:
    """Samples of the optimizer step that begins after `consumed_samples`: the rule of Megatron-Core 0.16's
    `RampupBatchsizeNumMicroBatchesCalculator` (num_microbatches_calculator.py), which 0.19 no longer has."""
    ramp, final = config.train.rampup_batch_size, config.train.global_batch_size
    if ramp is None or consumed_samples > ramp[2]:
        return final
    start, increment, samples = ramp
    samples_per_increment = samples / ((final - start) // increment)
    return start + int(consumed_samples / samples_per_increment) * increment


def samples_of_iterations(config: RunConfig, iterations: float) -> float:
    """Number of samples in the first `iterations` steps of the run, with the batch size ramp-up."""
    final, samples = config.train.global_batch_size, 0
    remaining = iterations
    while remaining >= 1:
        size = global_batch_size_at(config, samples)
        if size == final:
            break
        samples, remaining = samples + size, remaining - 1
    return samples + remaining * global_batch_size_at(config, samples)


def iterations_of_samples(config: RunConfig, samples: int) -> int:
    """Steps of a run of `samples` samples; the last partial batch is dropped (Megatron-LM's `update_train_iters`,
    megatron/training/training.py)."""
    consumed = iterations = 0
    ramp = config.train.rampup_batch_size
    while ramp is not None and consumed <= min(ramp[2], samples):
        consumed += global_batch_size_at(config, consumed)
        iterations += 1
    return iterations + max(0, samples - consumed) // config.train.global_batch_size


def train_samples(config: RunConfig) -> float:
    """Samples of the whole run."""
    samples = config.train.train_samples
    return samples_of_iterations(config, train_iters(config)) if samples is None else samples


def lr_decay_samples(config: RunConfig) -> float:
    """Samples until the learning rate reaches its floor."""
    if config.train.train_samples is None:
        return samples_of_iterations(config, lr_decay_iters(config))
    samples = config.learning_rate.lr_decay_samples
    return config.train.train_samples if samples is None else samples


def lr_warmup_samples(config: RunConfig) -> float:
    """Samples of warm-up."""
    rate = config.learning_rate
    if config.train.train_samples is None:
        return samples_of_iterations(config, lr_warmup_iters(config))
    fraction = rate.lr_warmup_fraction
    return rate.lr_warmup_samples if fraction is None else fraction * lr_decay_samples(config)


def lr_wsd_decay_samples(config: RunConfig) -> float | None:
    """Samples of the last phase of WSD; None without one."""
    rate = config.learning_rate
    if rate.lr_wsd_decay_iters is None:
        return rate.lr_wsd_decay_samples
    return lr_decay_samples(config) - samples_of_iterations(config, lr_decay_iters(config) - rate.lr_wsd_decay_iters)


def schedule_values(config: RunConfig) -> dict[str, Any]:
    """Values of Megatron-Core's `OptimizerParamScheduler` that are compared with a checkpoint's schedule; steps are in
    samples."""
    rate, optimizer = config.learning_rate, config.optimizer
    decay = optimizer.weight_decay
    return {
        "max_lr": rate.lr,
        "min_lr": rate.min_lr,
        "lr_warmup_steps": lr_warmup_samples(config),
        "lr_decay_steps": lr_decay_samples(config),
        "lr_decay_style": rate.lr_decay_style,
        "start_wd": decay if optimizer.start_weight_decay is None else optimizer.start_weight_decay,
        "end_wd": decay if optimizer.end_weight_decay is None else optimizer.end_weight_decay,
        "wd_incr_steps": train_samples(config),
        "wd_incr_style": optimizer.weight_decay_incr_style,
    }


def num_microbatches(config: RunConfig, data_parallel_size: int, global_batch_size: int | None = None) -> int:
    """Micro-batches of an optimizer step on each replica, by default for the final global batch size."""
    samples = config.train.global_batch_size if global_batch_size is None else global_batch_size
    return samples // (config.train.micro_batch_size * data_parallel_size)


def mock_samples(data: DataConfig) -> int | None:
    """Samples of mock data; None for other data."""
    return data.num_samples if data.data_key == "mock" else None


def has_mock_tokens(config: RunConfig) -> bool:
    """Whether the tokens of a run are generated, for any vocabulary."""
    return config.data.data_key == "mock" or config.data.mock_data or config.flow.flow_key == "minimal_mock"


def has_sources(data: DataConfig) -> bool:
    """Whether samples are read from the sources of `train` and `validation`."""
    return data.data_key in ("dataset", "jsonl")


def is_indexed(data: DataConfig) -> bool:
    """Whether samples are windows of Megatron's .bin and .idx files."""
    return data.data_key == "indexed"


def evaluation_set_names(config: RunConfig) -> tuple[str, ...]:
    """Names of the evaluation sets of `megatron_wrap.data`: those in `validation`, or the set `validation` of generated
    data or of a `split` with a share for it."""
    data = config.data
    if not is_indexed(data) or data.validation:
        return tuple(data.validation)
    has_share = data.split is not None and split_shares(data.split)[1] > 0
    return ("validation",) if data.mock_data or has_share else ()


def split_shares(split: str) -> tuple[float, float, float]:
    """The shares of training, validation and test of `megatron_wrap.data.split`, which sum to 1; ValueError for an
    invalid split (Megatron-Core's `parse_and_normalize_split`, blended_megatron_dataset_config.py)."""
    shares = [float(share) for share in split.split(",")]
    if len(shares) > 3 or not all(math.isfinite(share) and share >= 0 for share in shares) or not shares[0]:
        raise ValueError(split)
    shares += [0.0] * (3 - len(shares))
    return shares[0] / sum(shares), shares[1] / sum(shares), shares[2] / sum(shares)


def indexed_samples(config: RunConfig) -> int:
    """Number of windows that the training index of indexed data is built for."""
    windows = config.data.index_samples
    return math.ceil(train_samples(config)) if windows is None else windows


def training_sources(config: RunConfig) -> tuple[SourceConfig, ...]:
    """The sources of the training set, with unique names; empty if the caller passes samples, or the data is mock."""
    return config.data.train if has_sources(config.data) else ()


def validation_sources(config: RunConfig) -> Mapping[str, tuple[SourceConfig, ...]]:
    """Name of each evaluation set -> its sources."""
    return config.data.validation if has_sources(config.data) else {}


def output_dir(config: RunConfig) -> str:
    """Folder of metrics and event files; by default outputs/NAME-OF-THE-YAML."""
    folder = config.logger.output_dir
    return os.path.join("outputs", config.name) if folder is None else folder


def tensorboard_dir(config: RunConfig) -> str | None:
    """Folder of TensorBoard events, by default `tensorboard` in the output folder; None where none are written."""
    if config.logger.tensorboard_dir is not None:
        return config.logger.tensorboard_dir
    return os.path.join(output_dir(config), "tensorboard") if config.logger.enable_tensorboard else None


def optimizer_settings(optimizer: OptimConfig) -> dict[str, Any]:
    """Fields of Megatron-Core's OptimizerConfig that the user sets and a platform may lack."""
    return {**optimizer.upstream, "use_precision_aware_optimizer": optimizer.use_precision_aware_optimizer}


def captures_graphs(arch: ArchConfig) -> bool:
    """Whether Megatron-Core's layers are recorded as CUDA graphs in the first step, and replayed afterwards."""
    return arch.upstream.get("cuda_graph_impl") == "local" or bool(arch.upstream.get("enable_cuda_graph"))


def sorts_tokens_on_device(arch: ArchConfig) -> bool:
    """Whether the configuration allows experts as grouped matmuls whose tokens are sorted on the device and exchanged
    by a plain all-to-all (nn/experts/dispatcher.py)."""
    grouped = arch.experts_impl == "grouped_mm" or (arch.experts_impl == "auto" and arch.moe_grouped_gemm is None)
    others = ("moe_shared_expert_overlap", "moe_expert_capacity_factor", "moe_latent_size")
    return grouped and arch.moe_token_dispatcher_type == "alltoall" and not any(map(arch.upstream.get, others))


def varies_in_length(config: RunConfig) -> bool:
    """Whether micro-batches differ in shape: packed ones, and those that a shipped flow pads to their longest sample.
    False for other flows, where it is not known."""
    padded = config.flow.flow_key.startswith("gpt_") and not is_indexed(config.data)
    return config.flow.packing or (padded and config.flow.options.get("collate_type") != "fixed_length")


MULTIPLE = 16
"""Divisor of the dimensions of matrices in FP8 matmuls (Transformer Engine, assert_dim_for_fp8_exec; the gradient of a
weight needs 16)."""
BLOCK = 128
"""Divisor of the dimensions of a weight that is stored in FP8 blocks (Float8BlockQuantizer)."""


@dataclass(frozen=True)
class Fp8Settings:
    """FP8 settings of a run: values of `megatron_lm.train.dtype`."""

    format: str
    """FP8 format, "hybrid" or "e4m3"."""
    recipe: str
    param_gather: bool
    """Whether weights are stored in FP8."""
    first_last_layers_bf16: bool
    layers_at_start_in_bf16: int
    layers_at_end_in_bf16: int


def fp8_settings(config: RunConfig) -> Fp8Settings | None:
    """The run's FP8 settings; None: no FP8."""
    dtype = config.dtype
    if not dtype.fp8:
        return None
    in_bf16 = dtype.first_last_layers_bf16
    return Fp8Settings(
        format=dtype.fp8,
        recipe=dtype.fp8_recipe,
        param_gather=dtype.fp8_param_gather,
        first_last_layers_bf16=in_bf16,
        layers_at_start_in_bf16=dtype.num_layers_at_start_in_bf16 if in_bf16 else 0,
        layers_at_end_in_bf16=dtype.num_layers_at_end_in_bf16 if in_bf16 else 0,
    )


def token_multiple(config: RunConfig) -> int:
    """Divisor of the tokens of a micro-batch on each context-parallel rank."""
    return 1 if fp8_settings(config) is None else MULTIPLE
