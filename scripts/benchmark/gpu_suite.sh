#!/usr/bin/env bash
# The tables of docs/performance.md, gpu.md, adapters.md and configuration.md that one GPU gives; gpu_two.sh measures layouts of
# two GPUs, gpu_experts.sh mixtures of experts.
#   bash scripts/benchmark/gpu_suite.sh [PART ...]      (default: all parts)
# SIZE=tiny runs the same commands with tiny models on a CPU. Each part has a folder below $OUT (default outputs/gpu) with its
# compare.md, compare.json and logs.
set -u
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 CONSOLE_LOG_LEVEL=${CONSOLE_LOG_LEVEL:-WARNING}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
out=${OUT:-outputs/gpu} python=${PYTHON:-python3} here=scripts/benchmark
arch=megatron_lm.model.arch train=megatron_lm.train.common dtype=megatron_lm.train.dtype flow=megatron_wrap.flow
recompute=megatron_lm.train.recompute optimizer=megatron_lm.train.optimizer adapter=megatron_wrap.adapter
if [ "${SIZE:-full}" = tiny ]; then
  dense=tiny wide=tiny long=tiny mixed=tiny-mixed lora=tiny-lora mixed_lora=tiny-lora-mixed common=(--platform cpu) generate=(--longest 64 --new 8)
  model=$here/overhead.yaml families=(tiny-gpt-oss tiny-glm tiny-qwen3.5)
else
  dense=1.5b-4096 wide=8b-layers-4096 long=1.5b-32768 mixed=1.5b-mixed lora=8b-lora-4096 mixed_lora=8b-lora-mixed common=() generate=()
  model=$here/llama-1b.yaml families=(gpt-oss-20b-layers glm-4.5-air-layers qwen3.5-9b-layers qwen3.5-35b-a3b-layers)
fi
torch="ours-torch: $arch.transformer_impl=torch"
fp8() { echo "$dtype.fp8=hybrid $dtype.fp8_recipe=$1"; }
compare() {  # ARGUMENTS...: one call of compare.py; further calls of a part have folders of their own
  count=$((count + 1))
  "$python" $here/compare.py "$@" "${common[@]}" --rounds "${ROUNDS:-2}" --steps "${STEPS:-5}" --output "$out/$part-$count" || code=1
}
alone() {  # PRESET (NAME OVERRIDES)...: variants of megatron-wrap alone
  local variants=() preset=$1; shift
  while [ $# -gt 0 ]; do variants+=(--variant "ours-$1: $2"); shift 2; done
  compare "$preset" --against "" "${variants[@]}"
}

speed() {  # beside the bare loop and transformers' Trainer
  for preset in $dense $wide $long; do
    compare "$preset" --against trainer,bare-best --variant "$torch" --variant "ours-fp8: $(fp8 delayed)"
  done
}
packing() {  # sequences of unequal length: packed, padded to the longest of a micro-batch, and to the length of the context
  compare $mixed --against trainer --variant "$torch" \
    --variant "ours-dynamic: $flow.packing=false $train.max_tokens_per_micro_batch=null $train.micro_batch_size=4" \
    --variant "ours-padded: $flow.packing=false $flow.collate_type=fixed_length $train.max_tokens_per_micro_batch=null $train.micro_batch_size=4"
}
memory() {  # recomputation, offloaded optimizer states, FP8
  local aware="$optimizer.use_precision_aware_optimizer=true $optimizer.optimizer_cpu_offload=true"
  alone $dense selective "$recompute.__select__=selective" full "$recompute.__select__=full" \
    mlp "$recompute.__select__=selective $recompute.recompute_modules=[mlp]" \
    offload "$aware $optimizer.overlap_cpu_optimizer_d2h_h2d=true $optimizer.optimizer_offload_fraction=1.0" \
    delayed "$(fp8 delayed)" tensorwise "$(fp8 tensorwise)" blockwise "$(fp8 blockwise)" \
    tensorwise-weights "$(fp8 tensorwise) $dtype.fp8_param_gather=true" tensorwise-full "$(fp8 tensorwise) $recompute.__select__=full"
}
optimizer() {  # dtypes of the optimizer's state, Muon
  local aware="$optimizer.use_precision_aware_optimizer=true $optimizer.use_distributed_optimizer=true"
  local moments="$optimizer.exp_avg_dtype=bf16 $optimizer.exp_avg_sq_dtype=bf16"
  local gradients="$optimizer.main_grads_dtype=bf16 megatron_lm.misc.ddp.accumulate_allreduce_grads_in_fp32=false"
  alone $dense aware "$aware" moments "$aware $moments" gradients "$aware $gradients" both "$aware $moments $gradients" \
    fp8-moment "$aware $optimizer.exp_avg_dtype=fp8 $optimizer.exp_avg_sq_dtype=bf16" \
    fp16-weights "$aware $optimizer.main_params_dtype=fp16" muon "$optimizer.__select__=muon"
}
cross_entropy() {  # logits that are never stored
  local linear=megatron_wrap.model_provider.linear_cross_entropy
  for preset in $dense $long; do alone $preset stored "$linear=false" linear "$linear=true"; done
  compare $long $linear=true --against trainer-liger-fp32 --fresh
  compare $long $linear=true --against trainer-liger-fp32 --fresh $recompute.__select__=full
}
adapters() {
  compare $lora --against trainer,trainer-liger --fresh --variant "ours-fp8: $(fp8 delayed)" \
    --variant "ours-base-fp8: $adapter.base_weights=fp8" --variant "ours-base-nf4: $adapter.base_weights=nf4"
  compare $mixed_lora --against trainer-liger --fresh
}
families() {  # experts, sinks, linear attention, beside transformers' grouped experts
  for preset in "${families[@]}"; do
    local against=trainer; [[ $preset != *gpt-oss* ]] || against=trainer,trainer-flex
    compare "$preset" --against $against --fresh --variant "$torch"
  done
}
generation() {
  for implementation in torch transformer_engine; do
    torchrun --nproc-per-node 1 $here/generate_speed.py $model --name $implementation "${generate[@]}" \
      $arch.transformer_impl=$implementation | tee -a "$out/generation.txt"
  done
}

mkdir -p "$out"; code=0
for part in "${@:-speed packing memory optimizer cross_entropy adapters families generation}"; do
  for part in $part; do count=0; $part; done
done
exit $code
