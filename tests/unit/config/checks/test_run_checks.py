"""Contradictions: the exact refusal of each, and agreement with what Megatron-Core's own classes accept."""

import dataclasses
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _messages import assert_facts

from megatron_wrap.config import RunConfig, load_run_config
from megatron_wrap.config.checks.run import check_layout, check_run, check_values
from megatron_wrap.config.schema import derived
from megatron_wrap.errors import CheckpointError, ConfigError, DataError, LayoutError, MegatronWrapError
from megatron_wrap.platform import choose_platform

choose_platform("cpu").install()

from megatron.core import num_microbatches_calculator  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
Write = Callable[..., str]
LM = {
    "adapter": "megatron_wrap.adapter",
    "arch": "megatron_lm.model.arch",
    "parallel": "megatron_lm.model.parallel",
    "train": "megatron_lm.train.common",
    "rate": "megatron_lm.train.learning-rate",
    "optimizer": "megatron_lm.train.optimizer",
    "dtype": "megatron_lm.train.dtype",
    "recompute": "megatron_lm.train.recompute",
    "ddp": "megatron_lm.misc.ddp",
    "data": "megatron_wrap.data",
    "logger": "megatron_wrap.logger",
    "checkpoint": "megatron_wrap.checkpoint",
    "profile": "megatron_wrap.profile",
    "init": "megatron_wrap.init",
    "flow": "megatron_wrap.flow",
    "provider": "megatron_wrap.model_provider",
}


LINEAR = ("arch.experimental_attention_variant=gated_delta_net", "arch.linear_attention_freq=4")


def load(run: str, *short: str) -> RunConfig:
    """Overrides with the section's short name: load(run, "train.seed=1")."""
    return load_run_config(run, [f"{LM[text.partition('.')[0]]}.{text.partition('.')[2]}" for text in short])


def refusal(error: type[MegatronWrapError], check: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(error) as raised:
        check(*arguments)
    return str(raised.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_contradict_nothing(path: Path) -> None:
    config = load_run_config(path)
    check_values(config)
    replicas = 2 if path.stem == "tiny-mixtral-sft" else 1  # its experts take their processes out of these
    assert check_layout(config, derived.processes_needed(config)) == replicas
    assert derived.processes_needed(config) == {"tiny-llama-mock": 1}.get(
        path.stem, 2 if path.stem.startswith("tiny") else 8
    )


def test_a_mistake_in_the_yaml_names_its_line(write_run: Write) -> None:
    run = write_run("global_batch_size: 8", "global_batch_size: 7")
    assert_facts(
        refusal(ConfigError, check_run, load_run_config(run)),
        "run.yaml:12 megatron_lm.train.common.global_batch_size: global_batch_size 7 is not divisible by "
        "micro_batch_size 2; nearest legal sizes: 6 and 8",
    )


VALUES = [
    ("arch.num_attention_heads=7", ConfigError, "arch.num_attention_heads: hidden_size 256 is not divisible by "
     "num_attention_heads 7; change one of them, or give kv_channels"),
    ("arch.num_query_groups=3", ConfigError, "arch.num_query_groups: num_attention_heads 8 is not divisible by "
     "num_query_groups 3; legal num_query_groups: 1, 2, 4, 8"),
    ("arch.group_query_attention=false", ConfigError, "arch.group_query_attention: false contradicts num_query_groups "
     "4; delete one of the two"),
    ("arch.kv_channels=33", ConfigError, "arch.kv_channels: rope rotates pairs, and a head is 33 wide; make it even"),
    ("arch.squared_relu=true", ConfigError, "arch.squared_relu: swiglu and squared_relu are both true and name "
     "different activations; keep one"),
    ("arch.hidden_dropout=1", ConfigError, "arch.hidden_dropout: must be at least 0 and below 1, not 1.0"),
    ("arch.rotary_percent=0", ConfigError, "arch.rotary_percent: must be above 0 and at most 1, not 0.0"),
    ("train.seq_length=2048", ConfigError, "train.seq_length: seq_length 2048 is longer than the model's "
     "max_position_embeddings 1024; shorten the one or raise the other"),
    ("parallel.tensor_model_parallel_size=3", LayoutError, "parallel.tensor_model_parallel_size: num_attention_heads 8 "
     "is not divisible by tensor_model_parallel_size 3; legal sizes for this model: 1, 2, 4"),
    ("parallel.tensor_model_parallel_size=8", LayoutError, "parallel.tensor_model_parallel_size: num_query_groups 4 is "
     "not divisible by tensor_model_parallel_size 8; legal sizes for this model: 1, 2, 4"),
    ("parallel.tensor_model_parallel_size=0", ConfigError, "parallel.tensor_model_parallel_size: must be at least 1, "
     "not 0"),
    ("parallel.sequence_parallel=true", LayoutError, "parallel.sequence_parallel: true needs "
     "tensor_model_parallel_size > 1, which is 1; raise that, or write false or null"),
    ("parallel.pipeline_model_parallel_size=5", LayoutError, "parallel.pipeline_model_parallel_size: 4 layers cannot "
     "be split over 5 stages of 1 chunk"),
    ("parallel.virtual_pipeline_model_parallel_size=2", LayoutError, "parallel.virtual_pipeline_model_parallel_size: a "
     "virtual pipeline needs pipeline_model_parallel_size > 1, which is 1"),
    ("parallel.expert_model_parallel_size=2", LayoutError, "parallel.expert_model_parallel_size: 2 needs a model with "
     "experts; give megatron_lm.model.arch.num_experts, or leave it at 1"),
    ("parallel.decoder_first_pipeline_num_layers=1", LayoutError, "parallel.decoder_first_pipeline_num_layers: an "
     "uneven split needs pipeline_model_parallel_size > 1, which is 1"),
    ("train.micro_batch_size=3", ConfigError, "train.micro_batch_size: global_batch_size 8 is not divisible by "
     "micro_batch_size 3; nearest legal sizes: 6 and 9"),
    ("train.eval_interval=0", ConfigError, "train.eval_interval: must be at least 1, not 0; null leaves it out"),
    ("train.sample_prompts=[]", ConfigError, "train.sample_prompts: [] must be a list of texts, none of them empty; "
     "null logs no sample"),
    ("train.sample_prompts=[It was]", ConfigError, "train.sample_prompts: prompts need a tokenizer; give "
     "megatron_wrap.data.tokenizer, or write null"),
    ("train.sample_prompts=[[]]", ConfigError, "train.sample_prompts: [[]] must be a list of texts or lists of "
     "messages, none of them empty; null logs no sample"),
    ("train.sample_prompts=[[{role: user}]]", ConfigError, "train.sample_prompts: the message {'role': 'user'} lacks "
     "role or content; write {role: user, content: ...}"),
    ("train.save_interval=5", ConfigError, "train.save_interval: 5 has no effect without "
     "megatron_lm.train.common.save"),
    ("profile.steps=[2,99]", ConfigError, "profile.steps: [2, 99] contains 99, but the last is train_iters 10"),
    ("checkpoint.keep=1", ConfigError, "checkpoint.keep: 1 has no effect without megatron_lm.train.common.save"),
    ("checkpoint.export_hf=true", ConfigError, "checkpoint.export_hf: export_hf true needs "
     "megatron_lm.train.common.save, which is null; set it, or write export_hf: false"),
    ("provider.verify_hf=true", ConfigError, "provider.verify_hf: verify_hf true needs hf_path, which is null; "
     "set it, or write verify_hf: false"),
    ("train.early_stop_patience=2", ConfigError, "train.early_stop_patience: 2 needs "
     "megatron_wrap.checkpoint.best_metric, which is null; give it, or write null"),
    ("checkpoint.best_metric=validation/loss", ConfigError, "checkpoint.best_metric: validation/loss needs "
     "megatron_lm.train.common.eval_interval, which is null; give it, or write null"),
    ("train.finetune=true", ConfigError, "train.finetune: true takes the weights of load, which is null; give load"),
    ("train.rampup_batch_size=[4, 3, 100]", ConfigError, "train.rampup_batch_size: steps of 3 from 4 do not reach "
     "global_batch_size 8; the difference 4 must be a positive multiple of the increment"),
    ("train.rampup_batch_size=[3, 5, 100]", ConfigError, "train.rampup_batch_size: start 3 and increment 5 must be "
     "multiples of micro_batch_size 2"),
    ("train.rampup_batch_size=[0, 4, 100]", ConfigError, "train.rampup_batch_size: [start, increment, samples] must be "
     "positive, not [0, 4, 100]"),
    ("rate.lr_warmup_iters=10", ConfigError, "rate.lr_warmup_iters: the warm-up of 10 iterations must be shorter than "
     "the decay of 10 (lr_decay_iters, else train_iters)"),
    ("rate.lr_warmup_fraction=1", ConfigError, "rate.lr_warmup_fraction: must be at least 0 and below 1, not 1.0"),
    ("rate.min_lr=1", ConfigError, "rate.min_lr: min_lr 1.0 is above lr 0.0002"),
    ("rate.lr_decay_style=WSD", ConfigError, "rate.lr_decay_style: WSD needs lr_wsd_decay_iters, the length of its "
     "last phase"),
    ("rate.lr_wsd_decay_iters=3", ConfigError, "rate.lr_wsd_decay_iters: 3 only applies to lr_decay_style WSD, "
     "which is linear; delete it"),
    ("optimizer.end_weight_decay=0.1", ConfigError, "optimizer.end_weight_decay: weight decay from 0.01 to 0.1 needs "
     "weight_decay_incr_style linear or cosine, which is constant"),
    ("optimizer.adam_beta2=1", ConfigError, "optimizer.adam_beta2: must be at least 0 and below 1, not 1.0"),
    ("dtype.loss_scale=8", ConfigError, "dtype.loss_scale: 8.0 only applies to fp16; delete it or select fp16"),
    ("recompute.recompute_granularity=full", ConfigError, "recompute.recompute_granularity: recompute_granularity full "
     "needs recompute_method"),
    ("recompute.recompute_num_layers=1", ConfigError, "recompute.recompute_num_layers: 1 only applies to "
     "recompute_granularity full alone"),
    ("recompute.recompute_modules=[mlp]", ConfigError, "recompute.recompute_modules: a list only applies to "
     "recompute_granularity selective alone"),
    ("data.train=a.jsonl", ConfigError, "data.train: a file has no effect with data_key none; write data: {__select__: "
     "jsonl}"),
    ("data.__select__=jsonl", ConfigError, "data.data_key: jsonl needs train, a JSON lines file (or validation, to "
     "evaluate only)"),
    ("init.distributed_timeout_minutes=0", ConfigError, "init.distributed_timeout_minutes: must be above 0, not 0.0"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "error", "message"), VALUES, ids=[row[0] for row in VALUES])
def test_what_is_refused(write_run: Write, override: str, error: type[MegatronWrapError], message: str) -> None:
    config = load(write_run(), override)
    short, _, rest = message.partition(".")
    assert_facts(refusal(error, check_values, config), f"{LM[short]}.{rest}")
    assert type(refusal_error(config)) is error


def refusal_error(config: RunConfig) -> MegatronWrapError:
    try:
        check_values(config)
    except MegatronWrapError as error:
        return error
    raise AssertionError("nothing was refused")


PIPELINE = ["parallel.pipeline_model_parallel_size=2"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rate.lr_warmup_iters=2", "rate.lr_warmup_fraction=0.1"],
            "lr_warmup_fraction 0.1 and lr_warmup_iters 2 are both set; delete one",
        ),
        (
            ["train.max_tokens_per_micro_batch=100", "train.seq_length=128"],
            "max_tokens_per_micro_batch 100 is less than seq_length 128, so a sample may not fit; set it to at least "
            "128",
        ),
        (
            ["train.max_tokens_per_micro_batch=512", "parallel.pipeline_model_parallel_size=2"],
            "a pipeline takes micro-batches of one shape; set megatron_wrap.flow.packing: true, or "
            "max_tokens_per_micro_batch: null",
        ),
        (
            ["train.global_batch_tokens=512", "train.rampup_batch_size=[4, 2, 100]"],
            "rampup_batch_size counts samples, global_batch_tokens tokens; delete one",
        ),
        (
            [
                *("flow.packing=true", "arch.num_experts=4", "arch.moe_aux_loss_coeff=0.01"),
                "arch.moe_router_load_balancing_type=seq_aux_loss",
            ],
            "seq_aux_loss needs one sequence in each row; set packing: false, or the router's loss to aux_loss, "
            "global_aux_loss or none",
        ),
        (["train.train_samples=80"], "train_iters 10 and train_samples 80 are both set; delete one"),
        (
            ["train.train_iters=null", "train.train_samples=80", "rate.lr_warmup_iters=2"],
            "2 does not go with train_samples; give lr_warmup_samples",
        ),
        (["rate.lr_decay_samples=8"], "8 does not go with train_iters or train_epochs; give lr_decay_iters"),
        (["train.train_epochs=2"], "train_iters 10 and train_epochs 2 are both set; delete one"),
        (["train.train_iters=null"], "a run needs train_iters, its number of steps, or train_epochs"),
        (
            ["train.train_iters=null", "train.train_epochs=2"],
            "epochs are those of megatron_wrap.data, which has no train; give train_iters",
        ),
        (
            [
                *("train.train_iters=null", "train.train_epochs=0.5", "data.__select__=dataset"),
                "data.train={path: web.jsonl, streaming: true}",
            ],
            "web stream, so an epoch has no known length; give train_iters",
        ),
        (["dtype.bf16=true", "dtype.fp16=true"], "bf16 and fp16 are both true; select one of bf16, fp16, fp32"),
        (
            ["ddp.overlap_param_gather=true", "ddp.overlap_grad_reduce=false"],
            "true needs overlap_grad_reduce, which is false",
        ),
        (
            ["ddp.overlap_param_gather=true", "optimizer.use_distributed_optimizer=false"],
            "true needs megatron_lm.train.optimizer.use_distributed_optimizer, which is false",
        ),
        (
            ["ddp.overlap_param_gather=true", "optimizer.__select__=sgd"],
            "true needs Megatron-Core's distributed optimizer, which takes adam, not sgd; write false or select adam",
        ),
        (
            ["optimizer.__select__=sgd", "optimizer.use_distributed_optimizer=true"],
            "Megatron-Core's distributed optimizer takes adam, not sgd; write false or select adam",
        ),
        (
            ["optimizer.__select__=muon", "optimizer.use_distributed_optimizer=true"],
            "use_distributed_optimizer true needs optimizer adam, which is muon",
        ),
        (["optimizer.muon_momentum=0.9"], "muon_momentum 0.9 needs optimizer muon, which is adam"),
        (["optimizer.__select__=muon", "optimizer.muon_scale_mode=spectral"], "needs emerging_optimizers"),
        (
            ["optimizer.exp_avg_dtype=bf16"],
            "exp_avg_dtype bf16 needs use_precision_aware_optimizer true, which is false",
        ),
        (
            ["optimizer.use_precision_aware_optimizer=true", "optimizer.use_distributed_optimizer=false"],
            "use_precision_aware_optimizer true needs use_distributed_optimizer",
        ),
        (
            ["optimizer.use_precision_aware_optimizer=true", "optimizer.main_grads_dtype=bf16"],
            "main_grads_dtype bf16 needs megatron_lm.misc.ddp.accumulate_allreduce_grads_in_fp32 false, which is true",
        ),
        (
            [
                "optimizer.weight_decay_incr_style=linear",
                "optimizer.start_weight_decay=0.1",
                "optimizer.end_weight_decay=0",
            ],
            "weight decay can only grow; it goes from 0.1 to 0.0",
        ),
        (
            [
                "optimizer.optimizer_cpu_offload=true",
                "optimizer.use_distributed_optimizer=true",
                "optimizer.use_precision_aware_optimizer=true",
            ],
            "true needs megatron_lm.train.optimizer.optimizer_offload_fraction above 0",
        ),
        (
            ["optimizer.override_opt_param_scheduler=true", "optimizer.use_checkpoint_opt_param_scheduler=true"],
            "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both true; keep one",
        ),
        (
            ["recompute.__select__=full", "recompute.distribute_saved_activations=true"],
            "true needs recompute_granularity full, tensor_model_parallel_size > 1 and sequence_parallel false; they "
            "are full, 1 and false",
        ),
        (
            ["arch.num_query_groups=null", "arch.group_query_attention=true"],
            "true needs num_query_groups, the number of key and value heads",
        ),
        (
            ["arch.position_embedding_type=none", "arch.use_rope_scaling=true"],
            "needs position_embedding_type rope, which is none",
        ),
        (
            ["data.__select__=jsonl", "data.train=a.jsonl", "train.eval_interval=5"],
            "5 needs megatron_wrap.data.validation, which is null; give it or write null",
        ),
        (
            ["rate.lr_decay_style=WSD", "rate.lr_wsd_decay_iters=11"],
            "11 is longer than the whole schedule of 10",
        ),
        (
            ["dtype.__select__=fp16", "dtype.initial_loss_scale=0.5"],
            "initial_loss_scale 0.5 is below min_loss_scale 1.0",
        ),
        (
            [
                "parallel.pipeline_model_parallel_size=2",
                "parallel.num_layers_per_virtual_pipeline_stage=1",
                "parallel.virtual_pipeline_model_parallel_size=2",
            ],
            "both virtual-pipeline keys are given, and each defines the number of chunks; delete one",
        ),
        (
            ["parallel.pipeline_model_parallel_size=2", "parallel.num_layers_per_virtual_pipeline_stage=3"],
            "3 does not divide the 2 layers of a stage; legal: 1, 2",
        ),
        (
            ["parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=3"],
            "4 layers cannot be split over 2 stages of 3 chunks",
        ),
        (
            ["parallel.pipeline_model_parallel_size=3", "parallel.pipeline_split=even"],
            "num_layers 4 is not divisible by pipeline_model_parallel_size 3; legal sizes: 1, 2, 4; or split unevenly",
        ),
        (
            [
                *("parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=3"),
                "parallel.pipeline_split=even",
            ],
            "3 chunks do not divide a stage of 2 layers; legal: 1, 2",
        ),
        *(
            ([*PIPELINE, f"parallel.pipeline_model_parallel_layout='{layout}'", *more], text)
            for layout, text, more in (
                ("Et*2|t*3L", "has 5 layers (t), and num_layers is 4", []),
                ("E|t*4L", "has no layer (t) in part 1 of 2", []),
                ("Et*2|t*2", "must have one E, first of all, and one L, last of all", []),
                ("Et*2|mt*2L", "contains 'm'; use E, t, L, | and *; layers of multi-token prediction are not", []),
                ("Et|t|t*2L", "has 3 parts, which is no multiple of pipeline_model_parallel_size 2", []),
                ("Et|(t|)*2tL", "2 parts for each stage, not 3", ["parallel.virtual_pipeline_model_parallel_size=3"]),
                (
                    "Et|t*3L",
                    "as does decoder_first_pipeline_num_layers",
                    ["parallel.decoder_first_pipeline_num_layers=1"],
                ),
            )
        ),
        (
            ["arch.multi_latent_attention=true"],
            "multi_latent_attention takes num_query_groups null or 8, not 4",
        ),
        (
            ["arch.multi_latent_attention=true", "arch.num_query_groups=null", "arch.qk_pos_emb_head_dim=7"],
            "rope rotates pairs, and the rotated part of a head is 7 wide; make it even",
        ),
        (
            [
                "arch.multi_latent_attention=true",
                "arch.num_query_groups=null",
                "parallel.tensor_model_parallel_size=2",
                "parallel.sequence_parallel=false",
            ],
            "false with tensor_model_parallel_size > 1 is not supported for multi_latent_attention; write true or null",
        ),
        (
            ["arch.num_experts=4", "arch.moe_layer_freq=([0]*2+[1]*3)"],
            "defines 5 layers, 3 of them with experts, and num_layers is 4; write 0 (dense) or 1 for each layer, and "
            "at least one 1",
        ),
        (["arch.num_experts=4", "arch.moe_layer_freq=open()"], "'open()' is no list of 0 and 1 such as ([0]*3+[1]*58)"),
        (["arch.num_experts=4", "arch.moe_layer_freq=([0]*9999)*9999"], "is no list of 0 and 1"),
        (["arch.num_experts=4", "arch.moe_layer_freq=([[1]]*5)"], "is no list of 0 and 1"),
        (["arch.num_experts=4", "arch.moe_layer_freq=" + "(" * 5000], "is no list of 0 and 1"),
        (["arch.num_experts=4", "arch.moe_layer_freq=0"], "must be at least 1, not 0"),
        (
            ["arch.moe_ffn_hidden_size=64"],
            "64 needs num_experts, which is null; set it, or write moe_ffn_hidden_size: null",
        ),
        (["arch.num_experts=4", "arch.moe_router_topk=5"], "5 is more than num_experts 4"),
        (
            ["arch.num_experts=4", "arch.moe_router_topk=1"],
            "1 with a softmax over the chosen expert alone gives it "
            "weight 1 and the router no gradient; set moe_router_pre_softmax: true",
        ),
        (
            ["arch.num_experts=4", "arch.moe_router_enable_expert_bias=true"],
            "true needs moe_router_score_function sigmoid",
        ),
        (["arch.num_experts=4", "arch.moe_shared_expert_gate=true"], "true needs moe_shared_expert_intermediate_size"),
        (
            ["arch.num_experts=4", "arch.add_bias_linear=true", "arch.experts_impl=sequential"],
            "biases of experts need experts_impl grouped_mm; write auto, or write add_bias_linear: false",
        ),
        (
            ["arch.num_experts=4", "arch.add_bias_linear=true", "arch.moe_shared_expert_intermediate_size=8"],
            "shared experts cannot have biases",
        ),
        (["arch.window_attn_skip_freq=[1,0]", "arch.window_size=[3,0]"], "2 values for 4 layers"),
        ([*LINEAR, "arch.linear_attention_freq=[1,0]"], "defines 2 layers, 1 of them with linear attention"),
        ([*LINEAR, "arch.linear_attention_freq=1"], "defines 4 layers, 0 of them with linear attention"),
        (["arch.linear_attention_freq=4"], "linear_attention_freq 4 needs experimental_attention_variant"),
        ([*LINEAR, "arch.linear_num_value_heads=40"], "40 is not a multiple of linear_num_key_heads 16"),
        (
            [*LINEAR, "arch.linear_num_key_heads=2", "parallel.tensor_model_parallel_size=4"],
            "linear_num_key_heads 2 is not divisible by the 4 processes",
        ),
        (["arch.rope_type=yarn", "arch.rotary_percent=0.5"], "rope_type yarn needs rotary_percent 1.0, which is 0.5"),
        (
            ["arch.rope_type=longrope", "arch.longrope_short_factor=[1,2]"],
            "needs a positive factor for each of the 16 rotated pairs of a head, not [1.0, 2.0]",
        ),
        (["arch.swiglu=false", "arch.glu_linear_offset=1"], "1.0 needs swiglu, geglu or quick_geglu"),
        (["arch.qk_layernorm_type=per_layer"], "per_layer needs qk_layernorm true"),
        (
            ["arch.qk_layernorm=true", "arch.qk_layernorm_type=per_layer", "arch.normalization=LayerNorm"],
            "qk_layernorm_type per_layer needs normalization RMSNorm, which is LayerNorm",
        ),
        (["arch.window_rotary_base=5000"], "5000.0 needs window_size"),
        (
            ["arch.attn_logit_softcapping=50", "arch.transformer_impl=transformer_engine"],
            "attn_logit_softcapping 50.0 needs transformer_impl auto or torch, which is transformer_engine",
        ),
        (
            ["arch.window_rotary_base=5000", "arch.window_size=[7,0]", "arch.position_embedding_type=none"],
            "window_rotary_base 5000.0 needs position_embedding_type rope, which is none",
        ),
        (
            ["arch.num_experts=4", "arch.moe_router_num_groups=2"],
            "moe_router_num_groups and moe_router_group_topk go together; give both or none",
        ),
        (
            [
                "arch.num_experts=6",
                "arch.moe_router_num_groups=3",
                "arch.moe_router_group_topk=1",
                "arch.moe_router_topk=4",
            ],
            "1 of 3 groups of 6 experts cannot provide moe_router_topk 4; the number of groups must divide "
            "num_experts, and moe_router_group_topk of them must hold enough",
        ),
        (
            ["arch.num_experts=4", "arch.moe_aux_loss_coeff=[0.1, 0.2]"],
            "a list of load balancing types needs a list of as many coefficients",
        ),
        (["arch.num_experts=4", "arch.moe_aux_loss_coeff=-1.0"], "must be at least 0, not -1.0"),
        (
            ["arch.num_experts=4", "arch.moe_router_load_balancing_type=none", "arch.moe_aux_loss_coeff=0.1"],
            "0.1 has no meaning for moe_router_load_balancing_type none; set it to 0, or choose aux_loss",
        ),
        (
            ["arch.num_experts=4", "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=false"],
            "false with tensor_model_parallel_size > 1 is not supported for a model with experts; write true or null",
        ),
        (
            ["arch.num_experts=4", "arch.moe_ffn_hidden_size=63", "parallel.tensor_model_parallel_size=2"],
            "moe_ffn_hidden_size 63 is not divisible by the experts' tensor-parallel size 2; legal sizes: "
            "1, 3, 7, 9, 21, 63",
        ),
        (
            ["provider.provider_key=gpt_value_model", "flow.__select__=gpt_pretrain"],
            "gpt_value_model returns one value for each token, but gpt_pretrain needs logits; choose gpt_model",
        ),
        (
            ["provider.provider_key=gpt_value_model", "train.sample_prompts=[It was]", "data.tokenizer=folder"],
            "gpt_value_model returns scores and completes no prompt; write null",
        ),
        (
            ["init.platform=cpu", "arch.transformer_impl=transformer_engine"],
            "transformer_impl transformer_engine needs megatron_wrap.init.platform auto or cuda, which is cpu",
        ),
        (
            ["init.platform=cpu", "dtype.__select__=bf16", "dtype.fp8=hybrid"],
            "fp8 hybrid needs megatron_wrap.init.platform auto or cuda, which is cpu",
        ),
        (
            ["init.platform=cpu", "arch.num_experts=4", "arch.moe_token_dispatcher_type=flex"],
            "moe_token_dispatcher_type flex needs megatron_wrap.init.platform auto or cuda, which is cpu",
        ),
        (
            ["arch.cuda_graph_impl=transformer_engine"],
            "transformer_engine is captured by Megatron-LM's loop; write local",
        ),
        (
            ["arch.cuda_graph_impl=local", "flow.__select__=minimal_mock", "adapter.adapter_type=lora"],
            "CUDA graphs call no adapters of a layer; write none here",
        ),
        (
            ["arch.cuda_graph_impl=local", "flow.__select__=gpt_sft", "arch.vocab_size=60"],
            "CUDA graphs need micro-batches of one shape; write collate_type: fixed_length without packing, or none",
        ),
        (
            [
                "parallel.tensor_model_parallel_size=2",
                "parallel.sequence_parallel=false",
                "parallel.tp_comm_overlap=true",
            ],
            "true hides the communication of sequence parallelism; write sequence_parallel: null, or false here",
        ),
        (["init.platform=cpu", "arch.cuda_graph_impl=local"], "local does not work on platform cpu; write none"),
        (
            ["flow.__select__=gpt_sft", "data.__select__=mock"],
            "flow_key gpt_sft needs megatron_wrap.data.data_key none, dataset or jsonl, which is mock; write data: "
            "{__select__: dataset}, or choose another flow_key",
        ),
        (
            ["flow.__select__=gpt_pretrain", "data.__select__=mock"],
            "flow_key gpt_pretrain needs megatron_wrap.data.data_key none, dataset, jsonl or indexed, which is mock",
        ),
        (
            ["flow.__select__=gpt_sft", "data.__select__=indexed", "data.mock_data=true"],
            "flow_key gpt_sft needs megatron_wrap.data.data_key none, dataset or jsonl, which is indexed",
        ),
        (
            ["data.__select__=indexed", "data.mock_data=true", "data.eod_mask_loss=true"],
            "true needs the token that ends a document; set eod_token, or tokenizer",
        ),
        (
            ["arch.num_experts=6", "parallel.expert_model_parallel_size=4"],
            "4 does not divide num_experts 6; legal sizes: 1, 2, 3, 6",
        ),
        (
            ["arch.vocab_size=null", "flow.__select__=gpt_sft"],
            "null means the tokenizer's size; set it, or megatron_wrap.data.tokenizer",
        ),
    ],
)
def test_what_is_refused_together(write_run: Write, overrides: list[str], message: str) -> None:
    assert_facts(refusal(MegatronWrapError, check_values, load(write_run(), *overrides)), f": {message}")


@pytest.mark.parametrize(
    "overrides",
    [
        ["arch.num_attention_heads=7", "arch.kv_channels=32", "arch.num_query_groups=7"],
        ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
        ["parallel.pipeline_model_parallel_size=2", "parallel.num_layers_per_virtual_pipeline_stage=1"],
        ["parallel.virtual_pipeline_model_parallel_size=1"],
        ["optimizer.weight_decay_incr_style=cosine", "optimizer.end_weight_decay=0.1"],
        ["optimizer.use_distributed_optimizer=true", "ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true"],
        ["recompute.__select__=full"],
        ["recompute.__select__=selective", "recompute.recompute_modules=[mlp]"],
        ["rate.lr_decay_style=WSD", "rate.lr_wsd_decay_iters=4"],
        ["dtype.__select__=fp16", "dtype.loss_scale=128"],
        ["arch.num_experts=4", "parallel.expert_model_parallel_size=2"],
        ["arch.num_experts=4", "arch.moe_layer_freq='[0]+3*[1]'"],
        [
            "arch.num_experts=4",
            "arch.ffn_hidden_size=511",
            "arch.moe_ffn_hidden_size=64",
            "parallel.tensor_model_parallel_size=2",
        ],
        ["arch.vocab_size=null", "data.tokenizer=folder"],
        ["train.sample_prompts=[It was, Once]", "data.tokenizer=folder"],
        ["train.sample_prompts=[[{role: user, content: Hello}], Once]", "data.tokenizer=folder"],
        ["train.eval_interval=5"],  # the caller gives wrap.evaluate its samples
    ],
    ids=lambda overrides: overrides[-1],
)
def test_what_is_accepted(write_run: Write, overrides: list[str]) -> None:
    check_values(load(write_run(), *overrides))


def splits() -> Iterator[tuple[int, int, int | None, int | None, int | None]]:
    ends = (None, 1, 2, 3, 4)
    for stages, layers, first, last, chunks in itertools.product((2, 3, 4), (4, 6, 7, 8), ends, ends, (None, 2)):
        if first is not None or last is not None:
            yield stages, layers, first, last, chunks


def test_uneven_pipelines_are_those_that_megatron_accepts(write_run: Write) -> None:
    config = load(write_run())
    accepted = 0
    for stages, layers, first, last, chunks in splits():
        parallel = dataclasses.replace(
            config.parallel,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=chunks,
            decoder_first_pipeline_num_layers=first,
            decoder_last_pipeline_num_layers=last,
        )
        ours = dataclasses.replace(config, parallel=parallel, arch=dataclasses.replace(config.arch, num_layers=layers))
        try:
            TransformerConfig(
                num_layers=layers,
                hidden_size=8,
                num_attention_heads=1,
                pipeline_model_parallel_size=stages,
                pipeline_dtype=object(),
                virtual_pipeline_model_parallel_size=chunks,
                num_layers_in_first_pipeline_stage=first,
                num_layers_in_last_pipeline_stage=last,
            )
        except ValueError:
            with pytest.raises(LayoutError):
                check_values(ours)
            continue
        if (first or 0) + (last or 0) > layers:  # Megatron-Core lets a negative rest of layers pass here
            assert_facts(refusal(LayoutError, check_values, ours), "leave -")
            continue
        check_values(ours)
        assert sum(derived.layers_per_stage(ours)) == layers
        assert len(derived.layers_per_stage(ours)) == stages
        accepted += 1
    assert accepted > 20


class _Groups:
    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
@pytest.mark.parametrize("warmup", [0, 4, 9, 10, 12])
@pytest.mark.parametrize(("start", "end"), [(0.0, 0.1), (0.1, 0.1), (0.2, 0.1)])
def test_schedules_are_those_that_megatron_accepts(
    write_run: Write, style: str, warmup: int, start: float, end: float
) -> None:
    config = load(
        write_run(),
        f"rate.lr_decay_style={style}",
        f"rate.lr_warmup_iters={warmup}",
        f"rate.lr_wsd_decay_iters={3 if style == 'WSD' else 'null'}",
        f"optimizer.start_weight_decay={start}",
        f"optimizer.end_weight_decay={end}",
        f"optimizer.weight_decay_incr_style={'constant' if start == end else 'linear'}",
    )
    try:
        OptimizerParamScheduler(
            _Groups(), 0.0, 2e-4, 0.0, warmup, 10, style, start, end, 10, "linear", wsd_decay_steps=3
        )
    except AssertionError:
        with pytest.raises(ConfigError):
            check_values(config)
    else:
        check_values(config)


def test_the_ramp_up_is_that_of_megatron(write_run: Write) -> None:
    config = load(write_run(), "train.global_batch_size=24", "train.rampup_batch_size=[4, 4, 100]")
    check_values(config)
    assert derived.global_batch_sizes(config) == [4, 8, 12, 16, 20, 24]
    sizes = [derived.global_batch_size_at(config, consumed) for consumed in (0, 19, 20, 59, 60, 99, 100, 101)]
    assert sizes == [4, 4, 8, 12, 16, 20, 24, 24]
    calculator = getattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator", None)
    if calculator is not None:  # 0.19 has none
        theirs = calculator(24, 2, 1, False, 0, 4, 4, 100)
        for consumed in range(121):
            theirs.update(consumed, True)
            ours = derived.global_batch_size_at(config, consumed)
            assert ours == theirs.current_global_batch_size
            assert derived.num_microbatches(config, 1, ours) == theirs.num_micro_batches


def test_a_layout_names_its_sizes(write_run: Write) -> None:
    config = load(write_run(), "parallel.tensor_model_parallel_size=2", "parallel.context_parallel_size=2")
    assert (check_layout(config, 4), check_layout(config, 16)) == (1, 4)
    assert_facts(
        refusal(LayoutError, check_layout, config, 6),
        "6 processes do not hold whole replicas of the model: TP 2 x PP 1 x CP 2 = 4 processes each; start a multiple "
        "of 4, or change megatron_lm.model.parallel",
    )


def test_a_program_under_plain_python_is_answered_with_its_launch_command(
    write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(write_run(), "parallel.tensor_model_parallel_size=2")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["my run.py", "a=b"])
    command = "`torchrun --nproc-per-node 2 'my run.py' a=b`"
    assert command in refusal(LayoutError, check_layout, config, 1)
    monkeypatch.setattr(sys, "argv", ["/bin/megatron-wrap", "train"])
    assert "torchrun" not in refusal(LayoutError, check_layout, config, 1)


def test_each_replica_takes_whole_micro_batches(write_run: Write) -> None:
    config = load(write_run(), "parallel.tensor_model_parallel_size=2", "parallel.context_parallel_size=2")
    assert_facts(
        refusal(LayoutError, check_layout, config, 12),
        "run.yaml:12 megatron_lm.train.common.global_batch_size: the global batch of 8 samples is not divisible by "
        "micro_batch_size 2 x data-parallel size 3 (12 processes / 4) = 6; nearest legal sizes: 6 and 12",
    )


def test_every_step_of_a_ramp_up_must_divide(write_run: Write) -> None:
    config = load(write_run(), "train.rampup_batch_size=[2, 2, 100]")
    assert check_layout(config, 1) == 1
    assert_facts(
        refusal(LayoutError, check_layout, config, 2),
        "command line megatron_lm.train.common.rampup_batch_size: the global batch of 2 samples is not divisible by "
        "micro_batch_size 2 x data-parallel size 2 (2 processes / 1) = 4",
    )


def test_an_interleaved_pipeline_needs_whole_groups_of_micro_batches(write_run: Write) -> None:
    config = load(
        write_run("global_batch_size: 8", "global_batch_size: 6"),
        "parallel.pipeline_model_parallel_size=2",
        "parallel.virtual_pipeline_model_parallel_size=2",
    )
    assert_facts(
        refusal(LayoutError, check_layout, config, 2),
        "run.yaml:12 megatron_lm.train.common.global_batch_size: an interleaved pipeline of 2 stages needs a multiple "
        "of 2 micro-batches a step, and 6 samples make 3; nearest legal sizes: 4 and 8",
    )


def test_experts_must_fit_the_processes(write_run: Write) -> None:
    config = load(write_run(), "arch.num_experts=4", "parallel.expert_model_parallel_size=4")
    assert check_layout(config, 4) == 4
    assert_facts(
        refusal(LayoutError, check_layout, config, 2),
        "2 processes do not hold whole replicas of the experts: expert TP x EP x PP = 4 processes each; start a "
        "multiple of it, or change megatron_lm.model.parallel.expert_model_parallel_size",
    )


def test_numbers_that_follow(write_run: Write) -> None:
    config = load(write_run(), "rate.lr_warmup_fraction=0.25", "arch.ffn_hidden_size=null", "arch.hidden_size=4096")
    assert derived.lr_warmup_iters(config) == 2.5
    assert derived.ffn_hidden_size(config.arch) == 10880  # Megatron-LM's int((4 * 4096 * 2 / 3) / 64) * 64
    assert derived.ffn_hidden_size(dataclasses.replace(config.arch, swiglu=False)) == 4 * 4096
    assert derived.kv_channels(config.arch) == 512
    interleaved = load(
        write_run(), "parallel.pipeline_model_parallel_size=2", "parallel.num_layers_per_virtual_pipeline_stage=1"
    )
    assert derived.virtual_pipeline_size(interleaved) == 2


# ---- files and folders


def jsonl_run(write_run: Write, *more: str) -> RunConfig:
    return load(write_run(), "data.__select__=jsonl", "data.train=data/train.jsonl", *more)


def test_a_missing_data_file_names_the_nearest(write_run: Write, tmp_path: Path) -> None:
    config = jsonl_run(write_run)
    here = f"(relative to the working directory {tmp_path})"
    start = "command line megatron_wrap.data.train: "
    assert_facts(
        refusal(DataError, check_run, config),
        f"{start}no data file 'data/train.jsonl'; of its path only the working directory exists {here}",
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "trian.jsonl").touch()
    assert_facts(
        refusal(DataError, check_run, config),
        f"{start}no data file 'data/train.jsonl'; did you mean data/trian.jsonl? {here}",
    )
    (tmp_path / "data" / "train.jsonl").mkdir()
    assert_facts(refusal(DataError, check_run, config), f"{start}'data/train.jsonl' is a folder, not a data file")


def test_a_missing_tokenizer_or_checkpoint(write_run: Write, tmp_path: Path) -> None:
    config = load(write_run(), "data.tokenizer=tokeniser")
    (tmp_path / "tokenizer").mkdir()
    assert_facts(
        refusal(ConfigError, check_run, config),
        "command line megatron_wrap.data.tokenizer: no tokenizer folder 'tokeniser'; did you mean tokenizer?; give a "
        f"Hugging Face tokenizer folder (relative to the working directory {tmp_path})",
    )
    assert_facts(
        refusal(CheckpointError, check_run, load(write_run(), "train.load=ckpt/x")),
        "command line megatron_lm.train.common.load: no checkpoint folder 'ckpt/x'; of its path only the working "
        f"directory exists (relative to the working directory {tmp_path})",
    )


@pytest.mark.parametrize("key", ["train.save", "logger.output_dir"])
def test_an_output_folder_that_cannot_be_written(write_run: Write, tmp_path: Path, key: str) -> None:
    (tmp_path / "file").touch()
    section, name = key.split(".")
    assert_facts(
        refusal(ConfigError, check_run, load(write_run(), f"{key}=file/out")),
        f"command line {LM[section]}.{name}: 'file/out' cannot be a folder: {tmp_path}/file is a file; choose another "
        "folder",
    )
    owner = os.geteuid()
    with tempfile.TemporaryDirectory() as closed:  # not below tmp_path, which another user cannot enter
        Path(closed).chmod(0o555)
        config = load(write_run(), f"{key}={closed}/out/put")
        try:
            if owner == 0:  # root may write everywhere
                os.seteuid(65534)
            message = refusal(ConfigError, check_run, config)
        finally:
            os.seteuid(owner)
        assert os.listdir(closed) == []
    assert_facts(
        message,
        f"command line {LM[section]}.{name}: folder '{closed}/out/put' cannot be written: no permission in {closed}; "
        "choose another folder",
    )


def test_a_check_writes_nothing(write_run: Write, tmp_path: Path) -> None:
    check_run(load(write_run(), "train.save=deep/down/ckpt"))
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_the_steps_of_a_number_of_samples_are_those_of_megatron(write_run: Write) -> None:
    """`update_train_iters` of Megatron-LM (megatron/training/training.py), with Megatron-Core's own calculator."""
    calculator = getattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator", None)
    for samples, ramp in ((1000, None), (1007, (4, 4, 100)), (90, (4, 4, 100)), (500, (8, 16, 33))):
        overrides = ["train.train_iters=null", f"train.train_samples={samples}", "train.global_batch_size=24"]
        config = load(write_run(), *overrides, f"train.rampup_batch_size={'null' if ramp is None else list(ramp)}")
        check_values(config)
        consumed = iterations = 0
        if ramp is not None and calculator is not None:  # 0.19 has none
            theirs = calculator(24, 2, 1, False, 0, *ramp)
            while consumed <= ramp[2] and consumed <= samples:
                theirs.update(consumed, False)
                consumed += theirs.current_global_batch_size
                iterations += 1
        if ramp is None or calculator is not None:
            assert derived.train_iters(config) == iterations + max(0, samples - consumed) // 24
        assert (derived.lr_decay_samples(config), derived.lr_warmup_samples(config)) == (samples, 0)
