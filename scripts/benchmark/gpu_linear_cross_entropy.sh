#!/usr/bin/env bash
# Linear cross-entropy beside stored logits on one GPU: SFT and DPO of the 1.5B Llama at 4,096 tokens, SFT at 32,768, 131,072 with
# full recomputation; then beside transformers' Trainer with Liger-Kernel and fp32 weights and moments: 32,768 and 90,112 tokens
# without, 32,768, 131,072 and 262,144 with full recomputation. In at most 300 s, or LIMIT; PARTS="beside-long beside-longest": these.
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
  long=(--length 32768 --micro 1 --global 2) longer=131072 longest=262144 stored=90112
else
  config=$here/overhead.yaml trainer=tiny platform=(--platform cpu)
  short=(--length 128 --micro 4 --global 8) pairs=(--length 128 --micro 1 --global 2)
  long=(--length 512 --micro 1 --global 2) longer=1024 longest=2048 stored=768
fi
full=megatron_lm.train.recompute.__select__=full positions=megatron_lm.model.arch.max_position_embeddings

part sft-short 70 "$python" $measure $config "${short[@]}" --name sft-short --steps 4 --warmup 2
part sft-long 60 "$python" $measure $config "${long[@]}" --name sft-long --steps 2 --warmup 1
part dpo 40 "$python" $measure $config "${pairs[@]}" --flow dpo --ways stored,deferred --name dpo --steps 3 --warmup 2
part sft-longer 65 "$python" $measure $config $full --length $longer --micro 1 --global 1 --ways deferred,eight \
  --name sft-longer --steps 1 --warmup 1

beside() {  # NAME SECONDS STEPS WARMUP a.b=c...: ours and the Trainer, each in new processes, which give back all memory
  part "$1" "$2" "$python" $here/compare.py $trainer "${platform[@]}" "${@:5}" megatron_wrap.model_provider.linear_cross_entropy=true \
    --against trainer-liger-fp32 --fresh --rounds 1 --steps "$3" --warmup "$4" --output "$work/$1"
}
common=megatron_lm.train.common
one=("$common.global_batch_size=1" "$common.micro_batch_size=1") tokens=$common.seq_length
length() { echo "${one[@]} $tokens=$1 $positions=$1"; }
beside beside-long 90 2 1
beside beside-stored 120 1 0 $(length $stored)
beside beside-long-recomputed 110 2 1 $full
beside beside-longer 180 1 1 $full $(length $longer)
beside beside-longest 400 1 0 $full $(length $longest)
