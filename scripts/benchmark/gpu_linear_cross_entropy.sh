#!/usr/bin/env bash
# Linear cross-entropy beside stored logits on one GPU, in at most 300 s: SFT and DPO of the 1.5B Llama at 4,096 tokens, SFT at
# 32,768, then 131,072 and 262,144 tokens with full recomputation, and transformers' Trainer with Liger-Kernel at 32,768.
#   bash scripts/benchmark/gpu_linear_cross_entropy.sh [1b|tiny]      (tiny: the same commands on a CPU)
# Lines with a result are printed as they come and kept in $OUT (default outputs/gpu-linear-cross-entropy), with the logs.
set -u
cd "$(dirname "$0")/../.."
size=${1:-1b} kept=${OUT:-outputs/gpu-linear-cross-entropy} work=outputs/gpu-linear-cross-entropy/work
mkdir -p "$kept" "$work"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 CONSOLE_LOG_LEVEL=${CONSOLE_LOG_LEVEL:-WARNING}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
python=${PYTHON:-python3} here=scripts/benchmark
end=$((SECONDS + ${LIMIT:-300}))

source "$here/gpu_parts.sh"

measure=$here/linear_cross_entropy.py
if [ "$size" = 1b ]; then
  config=$here/llama-1b.yaml trainer=1.5b-32768 platform=()
  short=(--length 4096 --micro 4 --global 16) pairs=(--length 4096 --micro 1 --global 4)
  long=(--length 32768 --micro 1 --global 2) longer=131072 longest=262144
else
  config=$here/overhead.yaml trainer=tiny platform=(--platform cpu)
  short=(--length 128 --micro 4 --global 8) pairs=(--length 128 --micro 1 --global 2)
  long=(--length 512 --micro 1 --global 2) longer=1024 longest=2048
fi
full=megatron_lm.train.recompute.__select__=full positions=megatron_lm.model.arch.max_position_embeddings

part sft-short 70 "$python" $measure $config "${short[@]}" --name sft-short --steps 4 --warmup 2
part sft-long 60 "$python" $measure $config "${long[@]}" --name sft-long --steps 2 --warmup 1
part dpo 40 "$python" $measure $config "${pairs[@]}" --flow dpo --ways stored,deferred --name dpo --steps 3 --warmup 2
part sft-longer 65 "$python" $measure $config $full --length $longer --micro 1 --global 1 --ways deferred,eight \
  --name sft-longer --steps 1 --warmup 1
part sft-longest 75 "$python" $measure $config $full "$positions=$longest" --length $longest --micro 1 --global 1 --ways deferred \
  --name sft-longest --steps 1 --warmup 0
part trainer-liger 60 "$python" $here/compare.py $trainer "${platform[@]}" --against trainer-liger --rounds 1 --steps 2 \
  --warmup 1 --output "$work/compare"
