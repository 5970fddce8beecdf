#!/usr/bin/env bash
# Adapters on one GPU, in at most 390 s: packed sequences beside transformers' Trainer with Liger-Kernel, DPO with the base
# as its reference, quantized bases of an 8B and a 70B model, and PiSSA's decompositions of one layer.
#   bash scripts/benchmark/gpu_adapters.sh [8b|tiny]      (tiny: the same commands on a CPU)
# Lines with a result are printed as they come and kept in $OUT (default outputs/gpu-adapters), with the parts' logs.
set -u
cd "$(dirname "$0")/../.."
size=${1:-8b} kept=${OUT:-outputs/gpu-adapters} work=outputs/gpu-adapters/work
mkdir -p "$kept" "$work"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 CONSOLE_LOG_LEVEL=${CONSOLE_LOG_LEVEL:-WARNING}
python=${PYTHON:-python3} here=scripts/benchmark
arch=megatron_lm.model.arch train=megatron_lm.train.common adapter=megatron_wrap.adapter recompute=megatron_lm.train.recompute
end=$((SECONDS + ${LIMIT:-390}))

source "$here/gpu_parts.sh"

if [ "$size" = 8b ]; then
  large=("$arch.num_layers=32" "$arch.hidden_size=4096" "$arch.ffn_hidden_size=14336")
  config=$here/llama-1b.yaml mixed=(8b-lora-mixed) pairs=(--pairs 4 --steps 4 --warmup 2) quantized=() eight=8b seventy=70b
  sequence=(--micro-batch-size 1 --global-batch-size 2 --steps 2 --warmup 1)
  memory=$(nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits | head -1)
  echo "$memory MiB" | tee -a "$kept/results.txt"
  if [ "${memory##*, }" -lt 100000 ]; then  # the Trainer's 16 samples in a micro-batch take 90 GiB
    mixed+=("$train.micro_batch_size=8" "$train.max_tokens_per_micro_batch=8192")
  fi
else
  large=() config=$here/overhead.yaml mixed=(tiny-lora-mixed --platform cpu) eight=tiny seventy=tiny
  pairs=(--pairs 2 --steps 1 --warmup 1 "$train.seq_length=128") quantized=(--seq-length 64 --steps 1 --warmup 1)
  sequence=("${quantized[@]}" --micro-batch-size 1 --global-batch-size 2)
fi
lora=("$adapter.__select__=lora" "$adapter.r=16" "$adapter.lora_alpha=32")

part packed 110 "$python" $here/compare.py "${mixed[@]}" --against trainer-liger --fresh --rounds 1 --steps 4 --warmup 2 \
  --output "$work/packed"
part dpo 85 "$python" $here/reference_models.py $config "${lora[@]}" "${large[@]}" --ways base,precomputed --rounds 1 \
  "${pairs[@]}"
part quantized-8b 75 "$python" $here/quantized_base.py $eight --kinds nf4,bf16,fp8 "${quantized[@]}"
part quantized-70b 120 "$python" $here/quantized_base.py $seventy --kinds nf4 "${sequence[@]}" \
  $recompute.recompute_granularity=full $recompute.recompute_method=uniform $recompute.recompute_num_layers=1
part pissa-one-layer 45 "$python" $here/quantized_base.py $eight --kinds bf16 "${quantized[@]}" --steps 1 --warmup 1 \
  $arch.num_layers=1 $adapter.init_lora_weights=pissa
