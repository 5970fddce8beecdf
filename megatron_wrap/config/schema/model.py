"""The sections of the model: its architecture, its parallel layout and its provider."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_wrap.config.schema.keys import key


@dataclass(frozen=True, kw_only=True)
class ArchConfig:
    """`megatron_lm.model.arch`: the architecture of the model; the named architectures inherit these keys."""

    num_layers: int = key(at_least=1, at_most=10_000)
    """Transformer layers of the whole model."""
    hidden_size: int = key(at_least=1)
    """Width of the residual stream."""
    ffn_hidden_size: int | None = key(None, at_least=1)
    """Inner width of the MLP (of one half of it with swiglu); null: 4 * hidden_size, with swiglu 8/3 of it, down to a
    multiple of 64 (Megatron-LM's rule)."""
    num_attention_heads: int = key(at_least=1, at_most=100_000)
    """Query heads."""
    num_query_groups: int | None = key(None, at_least=1)
    """Key and value heads (grouped-query attention); null: as many as query heads."""
    group_query_attention: bool | None = None
    """Megatron-LM's switch for num_query_groups; null: on if num_query_groups is set."""
    kv_channels: int | None = key(None, at_least=1)
    """Width of one head; null: hidden_size / num_attention_heads."""
    vocab_size: int | None = key(None, at_least=1)
    """Entries of the vocabulary before padding; null: the size of the tokenizer of megatron_wrap.data.tokenizer; 4096
    for mock data without one."""
    make_vocab_size_divisible_by: int = key(128, at_least=1)
    """The embedding is padded to a multiple of this times the tensor-parallel size; padding entries have probability
    0."""
    max_position_embeddings: int | None = key(None, at_least=1)
    """Longest sequence, in tokens, and number of learned positions; null: train.common.seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """Learned position table, rotary embedding, or none."""
    rotary_base: float = key(10000.0, above=0)
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = key(1.0, above=0, at_most=1)
    """Share of a head's width that is rotated."""
    rotary_interleaved: bool = False
    """Rotate adjacent pairs (GPT-J) instead of halves (Llama)."""
    rotary_seq_len_interpolation_factor: float | None = key(None, above=0)
    """Positions are divided by this (linear scaling); null: 1."""
    use_rope_scaling: bool = False
    """Llama-3.1 scaling of the low rotary frequencies."""
    rope_scaling_factor: float = key(8.0, at_least=1)
    """Factor of Llama-3.1 scaling."""
    untie_embeddings_and_output_weights: bool = False
    """Separate input embedding and output layer."""
    embedding_multiplier: float | None = key(None, above=0)
    """The embedding's output is multiplied by this (Gemma: sqrt(hidden_size)), rounded to its precision; null: 1."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "LayerNorm"
    """Kind of norm."""
    norm_epsilon: float = key(1e-5, above=0)
    """Term that is added to the variance inside a norm."""
    apply_layernorm_1p: bool = False
    """Norm weights are stored as weight - 1 (zero-centered)."""
    norm_placement: Literal["before", "after", "both"] = "before"
    """Norms of attention and MLP: of their input (Llama), of their output before it is added to the residual stream
    (OLMo 2), or of both."""
    qk_layernorm: bool = False
    """Normalize queries and keys, as qk_layernorm_type defines it."""
    qk_layernorm_type: Literal["per_head", "per_layer"] = "per_head"
    """Normalize each head, or all queries and all keys of a token at once (OLMo 2, MiniMax-M2)."""
    swiglu: bool = False
    """Gated SiLU MLP (Llama); false: GELU (GPT-2) unless squared_relu, geglu or quick_geglu."""
    quick_geglu: bool = False
    """Gated MLP with the activation x * sigmoid(1.702 x) (gpt-oss)."""
    geglu: bool = False
    """Gated MLP with the tanh form of GELU (Gemma)."""
    activation_func_clamp_value: float | None = key(None, above=0)
    """In a gated MLP, the gate is at most this, and the linear part within this and its negative; null: unlimited."""
    glu_linear_offset: float = 0.0
    """Term that is added to the linear part of a gated MLP."""
    squared_relu: bool = False
    """Squared ReLU instead of GELU."""
    openai_gelu: bool = False
    """The tanh form of GELU, as GPT-2's published weights use it; false: the exact form."""
    add_bias_linear: bool = True
    """Biases in all linear layers, routers and experts included; those of experts need experts_impl grouped_mm."""
    add_qkv_bias: bool = False
    """Biases in the query, key and value projections (Qwen2)."""
    hidden_dropout: float = key(0.1, at_least=0, below=1)
    """Dropout after attention, MLP and embedding."""
    attention_dropout: float = key(0.1, at_least=0, below=1)
    """Dropout on attention probabilities."""
    init_method_std: float = key(0.02, above=0)
    """Standard deviation of initial weights; output projections get it divided by sqrt(2 * num_layers)."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Softmax of attention; off-by-one adds a sink, a score 0 without a value, learnable a learned one for each head
    (gpt-oss)."""
    attn_logit_softcapping: float | None = key(None, above=0)
    """Attention scores x become cap * tanh(x / cap) (Gemma 2), in torch's attention, with all scores of a sequence in
    memory; null: unlimited."""
    final_logit_softcapping: float | None = key(None, above=0)
    """Logits x become cap * tanh(x / cap) (Gemma 2); null: unlimited."""
    attention_softmax_in_fp32: bool = True
    """Softmax of attention in fp32."""
    fp32_residual_connection: bool = False
    """Residual stream in fp32."""
    window_size: tuple[int, int] | None = None
    """Sliding window of attention, [before, after] a token's own position, -1: unlimited; null: none. transformers'
    sliding_window W (Mistral) is [W - 1, 0]."""
    window_attn_skip_freq: int | tuple[int, ...] | None = None
    """With window_size, layers without a window: every N-th, or a list of 1 (window) and 0 for each layer; null:
    none."""
    window_rotary_base: float | None = key(None, above=0)
    """Base of the rotary frequencies of layers with a window, which are not scaled (Gemma 3, OLMo 3); null: as in the
    other layers."""
    multi_latent_attention: bool = False
    """Compute keys and values from a latent vector of width kv_lora_rank (DeepSeek's MLA); with false, q_lora_rank to
    v_head_dim have no effect. qk_layernorm then normalizes the latents."""
    q_lora_rank: int | None = key(None, at_least=1)
    """Width of the queries' latent vector; null: queries directly from the residual stream."""
    kv_lora_rank: int = key(512, at_least=1)
    """Width of the latent vector of keys and values."""
    qk_head_dim: int = key(128, at_least=1)
    """Width of the part of a query's and key's head without positions."""
    qk_pos_emb_head_dim: int = key(64, at_least=1)
    """Width of the rotated part of a head."""
    v_head_dim: int = key(128, at_least=1)
    """Width of a value's head."""
    latent_norm_epsilon: float | None = key(None, above=0)
    """Term that is added to the variance inside the norms of latent vectors; null: norm_epsilon."""
    rope_type: Literal["rope", "yarn", "longrope"] = "rope"
    """Rotary frequencies unchanged, or scaled by YaRN (arXiv:2309.00071) or LongRoPE (arXiv:2402.13753) with the keys
    below."""
    rotary_scaling_factor: float = key(40.0, at_least=1)
    """YaRN: factor by which the context is extended."""
    original_max_position_embeddings: int = key(4096, at_least=1)
    """YaRN: the original context, in tokens."""
    beta_fast: float = key(32.0, above=0)
    """YaRN: frequencies with at least this many rotations within the original context are unchanged."""
    beta_slow: float = key(1.0, above=0)
    """YaRN: frequencies with fewer rotations are divided by the whole factor."""
    mscale: float = key(1.0, at_least=0)
    """YaRN: strength of the scaling of the rotated parts with the context extension."""
    mscale_all_dim: float = key(0.0, at_least=0)
    """YaRN: with latent attention the strength of the scaling of all attention scores, 0: none; else the scaling of the
    rotated parts is divided by that of this strength."""
    correction_range_round_to_int: bool = True
    """YaRN: round the borders between unchanged and divided frequencies to whole pairs (transformers' truncate)."""
    longrope_short_factor: tuple[float, ...] | None = None
    """LongRoPE: the frequency of each rotated pair is divided by its factor, if train.common.seq_length is at most
    original_max_position_embeddings. It does not depend on the lengths in a batch, so packing changes nothing."""
    longrope_long_factor: tuple[float, ...] | None = None
    """LongRoPE: the factors for a train.common.seq_length above original_max_position_embeddings."""
    longrope_attention_factor: float = key(1.0, above=0)
    """LongRoPE: the rotated parts of queries and keys are multiplied by this."""
    query_scaling_beta: float | None = key(None, above=0)
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / original_max_position_embeddings)) (Llama 4,
    Ministral 3); null: unscaled."""
    attention_output_gate: bool = False
    """Multiply the output of attention by the sigmoid of a gate, as wide as the queries (Qwen3-Next)."""
    experimental_attention_variant: Literal["gated_delta_net"] | None = None
    """Kind of linear attention in the layers of linear_attention_freq: gated delta networks (arXiv:2412.06464,
    Qwen3-Next, Qwen3.5); null: attention in all layers."""
    linear_attention_freq: int | tuple[int, ...] | None = None
    """Layers with linear attention: all but every N-th, or a list of 1 (linear) and 0 for each layer; null: none."""
    linear_conv_kernel_dim: int = key(4, at_least=1)
    """Linear attention: tokens that the convolution of queries, keys and values spans, its own included."""
    linear_key_head_dim: int = key(128, at_least=1)
    """Linear attention: width of a query's and key's head."""
    linear_value_head_dim: int = key(128, at_least=1)
    """Linear attention: width of a value's head."""
    linear_num_key_heads: int = key(16, at_least=1)
    """Linear attention: heads of queries and keys, each for several heads of values."""
    linear_num_value_heads: int = key(32, at_least=1)
    """Linear attention: heads of values, each with a state."""
    num_experts: int | None = key(None, at_least=1, at_most=10_000)
    """Experts of each mixture-of-experts layer; null: a dense model, in which the moe_ keys have no effect."""
    moe_layer_freq: int | tuple[int, ...] | str = 1
    """Layers with experts: every N-th, beginning with the first; or a list of 0 (dense) and 1 for each layer, which may
    have Megatron-LM's form ([0]*3+[1]*58)."""
    moe_ffn_hidden_size: int | None = key(None, at_least=1)
    """Inner width of one expert (of one half of it with swiglu); null: ffn_hidden_size."""
    moe_shared_expert_intermediate_size: int | None = key(None, at_least=1)
    """Inner width of all shared experts together, which process every token; null: none."""
    moe_shared_expert_gate: bool = False
    """Multiply the shared experts' output by a sigmoid gate (Qwen2-MoE)."""
    moe_router_topk: int = key(2, at_least=1)
    """Experts that process a token."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to scores."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice; the weights of the chosen experts then sum to less than 1. false:
    softmax over the chosen experts."""
    moe_router_topk_scaling_factor: float | None = key(None, above=0)
    """The weights of the chosen experts are multiplied by this; null: 1."""
    moe_router_num_groups: int | None = key(None, at_least=1)
    """Groups of experts for group-limited routing (DeepSeek); null: none."""
    moe_router_group_topk: int | None = key(None, at_least=1)
    """Groups among which a token's experts are chosen."""
    moe_router_group_score_experts: int | None = key(None, at_least=1)
    """Groups are ranked by the sum of their N best scores: 1 in DeepSeek V2, 2 in V3; null: Megatron-Core's rule,
    moe_router_topk / moe_router_group_topk."""
    moe_router_enable_expert_bias: bool = False
    """A bias per expert, used only to choose experts, that moves toward balance after each step (DeepSeek V3); needs
    sigmoid scores."""
    moe_router_bias_update_rate: float = key(1e-3, at_least=0)
    """Step size of the bias of moe_router_enable_expert_bias."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router; null: that of the activations."""
    moe_router_load_balancing_type: (
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
        | tuple[Literal["aux_loss", "seq_aux_loss", "global_aux_loss"], ...]
    ) = "aux_loss"
    """Auxiliary loss over a micro-batch, over each sequence or over the batch so far; a list needs a list of
    coefficients; sinkhorn balances without a loss."""
    moe_aux_loss_coeff: float | tuple[float, ...] = 0.0
    """Coefficient of the auxiliary loss; 0: none. The metric load_balancing_loss excludes it."""
    moe_z_loss_coeff: float | None = key(None, at_least=0)
    """Coefficient of the router's z-loss; null: none. The metric z_loss excludes it."""
    mtp_num_layers: int | None = key(None, at_least=1, at_most=100)
    """Layers for multi-token prediction, each of which predicts one token further ahead; null: none, those of a folder
    are not loaded. gpt_sft and gpt_pretrain train them; other flows keep them with mtp_loss_scaling_factor 0."""
    mtp_loss_scaling_factor: float = key(0.1, at_least=0)
    """Coefficient of the mean of these layers' losses, which are the metrics mtp_1_loss, mtp_2_loss, ...; 0: the layers
    are neither computed nor trained, and are saved and exported unchanged."""
    experts_impl: Literal["auto", "grouped_mm", "transformer_engine", "sequential"] = "auto"
    """Implementation of the experts of a process: one grouped matmul (also on CPUs), Transformer Engine (needed for
    FP8), or one expert after the other; auto: grouped_mm without FP8, from torch 2.11."""
    moe_grouped_gemm: bool | None = None
    """The older form of experts_impl: true is transformer_engine, false sequential; null: experts_impl decides."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """Exchange that sends tokens to their experts over the expert-parallel processes."""
    transformer_impl: Literal["auto", "transformer_engine", "torch"] = "auto"
    """Layers from Transformer Engine, or Megatron-Core's own with torch's scaled_dot_product_attention; auto:
    Transformer Engine on a GPU if it is installed, else torch; with an adapter, and for dense layers under tensor or
    context parallelism where their communication is hidden or captured in CUDA graphs, torch; with FP8 Transformer
    Engine."""
    upstream: Mapping[str, Any]
    """Further fields of `TransformerConfig`, by name."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """`megatron_lm.model.parallel`: how the model is split over processes; data parallelism uses the remaining ones."""

    tensor_model_parallel_size: int = key(1, at_least=1)
    """Processes that share each layer's matrices (TP)."""
    pipeline_model_parallel_size: int = key(1, at_least=1)
    """Pipeline stages (PP)."""
    context_parallel_size: int = key(1, at_least=1)
    """Processes that share each sequence (CP)."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] | None = None
    """Exchange in the attention of shared sequences. all_gather: keys and values. p2p: keys and values in a ring,
    during attention (torch's gathers those of windows). a2a: heads. null: p2p where attention hides it, else the fewest
    bytes; the log explains the choice."""
    expert_model_parallel_size: int = key(1, at_least=1)
    """Processes that share the experts of a mixture-of-experts layer (EP)."""
    expert_tensor_parallel_size: int | None = key(None, at_least=1)
    """Tensor-parallel size inside experts; null: tensor_model_parallel_size."""
    sequence_parallel: bool | None = None
    """Split norms and dropouts over the sequence among the tensor-parallel processes; null: on if TP > 1."""
    tp_comm_overlap: bool | None = None
    """Overlap the communication of tensor and sequence parallelism with the matmuls of linear layers. Transformer
    Engine's layers: user buffers, for samples of a fixed length (UB_SKIPMC=1 in the environment: without multicast).
    torch's layers: the matmul with a process's share while the other shares arrive. No effect without tensor
    parallelism. null: on for torch's layers on GPUs, in half precision, with CUDA graphs or micro-batches that are
    large enough."""
    num_layers_per_virtual_pipeline_stage: int | None = key(None, at_least=1)
    """Layers in each model chunk of an interleaved pipeline (VPP); null: one chunk a stage."""
    virtual_pipeline_model_parallel_size: int | None = key(None, at_least=1)
    """Model chunks per stage, instead of num_layers_per_virtual_pipeline_stage."""
    decoder_first_pipeline_num_layers: int | None = key(None, at_least=1)
    """Layers on the first stage of an uneven split; null: pipeline_split."""
    decoder_last_pipeline_num_layers: int | None = key(None, at_least=1)
    """Layers on the last stage of an uneven split; null: pipeline_split."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each stage, or of each model chunk, in Megatron-LM's notation, such as Et*10|t*6L; null:
    pipeline_split."""
    pipeline_split: Literal["cost", "even"] = "cost"
    """Split of the layers over the stages where no key above sets numbers of layers. cost: the slowest stage takes as
    little time as possible, since the output layer takes the time of some layers; even: as many layers on each stage,
    as in Megatron-Core."""


@dataclass(frozen=True, kw_only=True)
class ProviderConfig:
    """`megatron_wrap.model_provider`: the function that builds the model, and its initial weights."""

    provider_key: str = "gpt_model"
    """Registered provider, or my_package.my_module:my_provider."""
    show_weight_details: bool = False
    """Log every parameter with its local shape."""
    hf_path: str | None = None
    """Hugging Face folder or hub id: architecture from its config.json, initial weights from its safetensors, and its
    tokenizer if megatron_wrap.data names none; null: model.arch, and weights from the seed."""
    hf_allow_pickle: bool = False
    """Read weights of hf_path from pytorch_model.bin if it has no safetensors and the file belongs to the user
    (torch.load with weights_only)."""
    verify_hf: bool = False
    """Compare the loaded model with transformers before training, and refuse to train on a difference."""
    linear_cross_entropy: Literal["auto"] | bool = "auto"
    """Compute the output layer and the loss together, chunk by chunk of tokens, so that the logits are never stored
    (docs/performance.md). auto: if the logits of a micro-batch take more than 2% of the device's memory."""
    options: Mapping[str, Any]
    """The provider's own keys."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """`megatron_wrap.adapter`: low-rank adapters (LoRA, arXiv:2106.09685) for frozen weights; names and meanings are
    those of peft's LoraConfig, modules have their names in Hugging Face's model."""

    adapter_type: Literal["none", "lora"] = "none"
    """none: train all weights; lora: freeze them, and train two low-rank factors for each target module."""
    path: str | None = None
    """Folder of a peft adapter (adapter_config.json, adapter_model.safetensors), whose factors are the initial ones;
    its r, alpha and target modules must be those below. null: new factors."""
    r: int = key(8, at_least=1)
    """Rank of the factors."""
    lora_alpha: float = key(8, above=0)
    """The product of the factors is multiplied by lora_alpha / r."""
    lora_dropout: float = key(0.0, at_least=0, below=1)
    """Dropout of the adapters' inputs in training; above 0, results differ between parallel layouts."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """all-linear (every linear layer of the decoder; in a mixture of experts those of attention), names or endings of
    names such as [q_proj, v_proj], or a regular expression that matches a whole name."""
    target_parameters: tuple[str, ...] = ()
    """Weights that get adapters, by endings of transformers' names: fused experts, one adapter for each expert, such as
    [mlp.experts.gate_up_proj, mlp.experts.down_proj], with experts_impl grouped_mm; and weights of linear layers, such
    as [shared_experts.down_proj.weight]. No dropout."""
    exclude_modules: str | tuple[str, ...] = ()
    """Modules of target_modules that get no adapter, in the same notation."""
    modules_to_save: tuple[str, ...] = ()
    """Embeddings, output layer and norms that are trained whole, by endings of their names, such as [embed_tokens,
    lm_head]; their original weights are kept as well. The head of a value model is always trained."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases that are trained whole: all, or lora_only, those of the layers with adapters; their originals are kept."""
    trainable_token_indices: tuple[int, ...] | Mapping[str, Any] = ()
    """Tokens whose rows of the embedding are trained; those of an output layer that is tied to it are the same ones. A
    mapping, such as {embed_tokens: [5, 7], lm_head: [5, 7]}, names them for each module."""
    ensure_weight_tying: bool = False
    """Train embedding and output layer of a model whose weights are tied as one matrix (modules_to_save)."""
    layers_to_transform: tuple[int, ...] = ()
    """Indices of the layers with adapters, from 0; []: all. Only with a list of target_modules."""
    rank_pattern: Mapping[str, int] | None = None
    """Regular expression of names of modules -> their rank instead of r; null: r for all."""
    alpha_pattern: Mapping[str, float] | None = None
    """Regular expression of names of modules -> their alpha instead of lora_alpha; null: lora_alpha for all."""
    use_rslora: bool = False
    """Multiply by lora_alpha / sqrt(r) (rank-stabilized LoRA, arXiv:2312.03732)."""
    use_dora: bool = False
    """Train the norm of each row of the adapted weights as well (DoRA, arXiv:2402.09353); needs lora_dropout 0."""
    init_lora_weights: bool | Literal["gaussian", "pissa"] = True
    """true: A uniform within 1 / sqrt(inputs), B zero; gaussian: A normal with deviation 1 / r, B zero; pissa
    (arXiv:2404.02948): the largest singular vectors of each weight, whose product is taken from the base; false: B as
    A, so that an adapter is active from the beginning, for tests."""
    loraplus_lr_ratio: float | None = key(None, above=0)
    """Learning rate of B over that of A (LoRA+, arXiv:2402.12354); null: equal."""
    others: Mapping[str, str] | None = None
    """Further adapters of the same base, frozen: name -> folder of peft. wrap.adapter(NAME) computes with one of them,
    and models.reference: {adapter: NAME} takes it as the reference. null: none."""
    base_weights: Literal["bf16", "fp8", "nf4"] = "bf16"
    """Storage of the frozen weights of linear layers: bf16 in the run's dtype; fp8 and nf4 quantized (QLoRA,
    arXiv:2305.14314), and dequantized layer by layer when needed. nf4 needs torchao (megatron-wrap[qlora])."""
    base_digest: Literal["headers", "weights"] = "headers"
    """Record of hf_path in a checkpoint of the adapter alone, which a resumed run compares. headers: config.json and
    the names, sizes and headers of the weight files; weights: also their contents, which are read for it."""
    keep_base: bool = False
    """Save the frozen weights with each checkpoint; false: only the adapter, if the frozen weights are those of
    model_provider.hf_path."""

    @property
    def decomposes_base(self) -> bool:
        """Whether the initial factors are computed from the base's weights, and their product is subtracted from the
        base."""
        return self.init_lora_weights == "pissa"
