#!/usr/bin/env bash
# Mixtures of experts on one GPU beside the bare loop and transformers' Trainer: forced balance and the models' own routing, with
# and without Transformer Engine, and a profile of a step.
#   bash scripts/benchmark/gpu_experts.sh [full|tiny]      (tiny: the same commands on a CPU)
# In at most LIMIT seconds (default 420; tiny 1,800); PARTS="qwen deepseek-own" measures these alone. Lines are printed as they
# come and kept in $OUT/results.txt (default outputs/gpu-experts), with the report and the profiles.
# A GPU of less than 100 GiB trains 4 layers instead of 8, in all programs: the state of ours takes 18 bytes for each of the
# 623 million parameters of a layer of Qwen3-30B-A3B (10.4 GiB; 8.8 of DeepSeek-V3's kind) and of 622 million outside (10.4),
# activations 1.9 GiB a layer and about 8 at the peak of a step: 68 GiB. The report names the number of layers.
set -u
cd "$(dirname "$0")/../.."
size=${1:-full} kept=${OUT:-outputs/gpu-experts} work=outputs/gpu-experts/work
rm -rf "$work"; mkdir -p "$kept" "$work"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 CONSOLE_LOG_LEVEL=${CONSOLE_LOG_LEVEL:-WARNING}
export KINETO_LOG_LEVEL=99  # the profiler prints its start and end
arch=megatron_lm.model.arch balanced=megatron_lm.model.arch.moe_router_force_load_balancing=true
if [ "$size" = full ]; then
  limit=${LIMIT:-420} qwen=moe-30b-a3b-layers deepseek=deepseek-v3-layers
  fused="Transformer Engine's cross-entropy" layers=4
  tried="fused router and permutation,garbage collection off"
  # Megatron-Core's fused weight gradients are a kernel of Apex
  ! "${PYTHON:-python3}" -c "import fused_weight_gradient_mlp_cuda" 2> /dev/null || tried+=",fused weight gradients"
  memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -1)
  [ "${memory:-0}" -lt 100000 ] || layers=8
  settings=(--standby --devices 1 --timeout 80)
  echo "$memory MiB: $layers layers" | tee -a "$kept/results.txt"
else
  limit=${LIMIT:-1800} qwen=tiny-moe deepseek=tiny-deepseek layers=2
  fused="native fused cross-entropy" tried="garbage collection off"
  settings=(--platform cpu --timeout 300)
fi
file=$work/tasks.txt; : > "$file"
task() {  # NAME PRESET [options or a.b=c ...]
  [[ " ${PARTS:-$1} " == *" $1 "* ]] || return 0
  { printf '%s:' "$1"; printf ' %q' "${@:2}" "$arch.num_layers=$layers"; echo; } >> "$file"
}
variants=(--variant "ours-torch: $arch.transformer_impl=torch")
variants+=(--variant "ours-profile: megatron_wrap.profile.steps=[4,5] megatron_wrap.profile.memory_snapshot=false")
# The Trainer routes by the model itself in any task, so it runs in one. The bare loop's default cross-entropy stores fp32
# logits, for which 80 GB do not suffice, so its search begins with the fused one (docs/gpu.md); the search's runs count.
task qwen $qwen $balanced --against bare-best,trainer --flags "$fused" --changes "$tried" "${variants[@]}"
task qwen-own $qwen --against ""
task deepseek $deepseek $balanced --against bare-best,trainer --flags "$fused" --changes "$tried" "${variants[@]}"
task deepseek-own $deepseek --against ""

"${PYTHON:-python3}" scripts/benchmark/compare.py --tasks "$file" "${settings[@]}" --rounds 1 --steps 4 --warmup 2 \
  --limit "$((limit - SECONDS - 15))" --output "$work" 2>&1 | tee -a "$kept/results.txt"
code=${PIPESTATUS[0]}
cp "$work"/compare.* "$kept/"
find "$work/run" -name profile.txt -exec tail -n +1 {} + | tee "$kept/profiles.txt"
for log in "$work"/logs/*.log; do echo "==> $log"; tail -c 200000 "$log"; done > "$kept/logs.txt"
exit "$code"
