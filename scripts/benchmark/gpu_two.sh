#!/usr/bin/env bash
# Layouts of two GPUs beside one GPU and the bare loop: tokens/s per GPU of the 1.5B Llama under data, tensor, context and
# pipeline parallelism, and of experts under expert parallelism. In at most 300 s, or LIMIT (tiny: 1,800); PARTS="tp cp-8192" runs these alone.
#   bash scripts/benchmark/gpu_two.sh [1b|tiny]      (tiny: the same commands on two CPU processes)
# Lines with a result are printed as they come and kept in $OUT (default outputs/gpu-two), with the logs.
set -u
cd "$(dirname "$0")/../.."
size=${1:-1b} kept=${OUT:-outputs/gpu-two} work=outputs/gpu-two/work
mkdir -p "$kept" "$work"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 CONSOLE_LOG_LEVEL=${CONSOLE_LOG_LEVEL:-WARNING}
export CUDA_DEVICE_MAX_CONNECTIONS=1  # kernels begin in the order in which they are queued
export NCCL_NVLS_ENABLE=0 UB_SKIPMC=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1  # no multicast over NVLink
python=${PYTHON:-python3} here=scripts/benchmark
limit=300 factor=1; [ "$size" = 1b ] || limit=1800 factor=4
end=$((SECONDS + ${LIMIT:-$limit}))

source "$here/gpu_parts.sh"

arch=megatron_lm.model.arch parallel=megatron_lm.model.parallel common=megatron_lm.train.common
if [ "$size" = 1b ]; then
  dense=1.5b-4096 experts=moe-30b-a3b-layers-balanced long=1.5b-32768 platform=() lengths=(8192 32768)
  many=(--steps 4 --warmup 2)
  engine=transformer_engine
else
  dense=tiny experts=tiny-moe long=tiny platform=(--platform cpu) lengths=(256 512)
  many=(--steps 2 --warmup 1)
  engine=torch
fi
step=$common.global_batch_size micro=$common.micro_batch_size tp=$parallel.tensor_model_parallel_size
torch=$arch.transformer_impl=torch hidden=$parallel.tp_comm_overlap=true graphs=$arch.cuda_graph_impl
virtual=$parallel.virtual_pipeline_model_parallel_size=2
best="Transformer Engine's cross-entropy"

compare() {  # NAME SECONDS PRESET DEVICES [options or a.b=c ...]
  part "$1" $(($2 * factor)) "$python" $here/compare.py "$3" "${platform[@]}" --devices "$4" --rounds 1 "${many[@]}" --timeout 60 \
    --output "$work/$1" "${@:5}"
}

# the reference of all: one GPU, the same micro-batch
compare one 40 $dense 1 $step=16 $micro=4 --against bare-best --changes "$best" --variant "ours-torch: $torch"
compare dp 40 $dense 2 $step=32 $micro=4 --against bare-best --changes "$best,overlapped communication" \
  --variant "ours-torch: $torch"
# tensor and sequence parallelism; tp_comm_overlap: user buffers, or symmetric memory beside torch's layers
compare tp 75 $dense 2 $step=16 $micro=4 $tp=2 --against bare-best --changes "$best,user buffers" \
  --variant "ours-user-buffers: $arch.transformer_impl=$engine $hidden" --variant "ours-torch: $torch" \
  --variant "ours-symmetric-memory: $torch $hidden"
compare tp-micro 75 $dense 2 $step=16 $micro=8 $tp=2 --against "" \
  --variant "ours-8-symmetric-memory: $torch $hidden" --variant "ours-8-user-buffers: $arch.transformer_impl=$engine $hidden" \
  --variant "ours-2: $micro=2" --variant "ours-2-torch: $micro=2 $torch" \
  --variant "ours-2-symmetric-memory: $micro=2 $torch $hidden"
if [ "$size" = 1b ]; then
  # Megatron-Core's CUDA graphs of layers, at a small micro-batch
  compare graphs 60 $dense 2 $step=16 $micro=2 $tp=2 --against "" --variant "ours-graphs: $graphs=local" \
    --variant "ours-torch: $torch" --variant "ours-torch-graphs: $torch $graphs=local"
fi
# context parallelism: one GPU and two, the same tokens per GPU and sequences; exchanges of both layer implementations
for length in "${lengths[@]}"; do
  tokens=("$common.seq_length=$length" "$arch.max_position_embeddings=$length" "$micro=1")
  count=$((131072 / length)); [ "$size" = 1b ] || count=2
  compare cp-one-$length 40 $long 1 "${tokens[@]}" $step=$((count / 2)) --against "" --variant "ours-torch: $torch"
  variants=()
  for exchange in p2p all_gather a2a; do
    kind=$parallel.cp_comm_type=$exchange
    variants+=(--variant "ours-$exchange: $kind" --variant "ours-torch-$exchange: $torch $kind")
  done
  compare cp-$length 80 $long 2 "${tokens[@]}" $step=$count $parallel.context_parallel_size=2 --against bare-best \
    --changes "$best" "${variants[@]}"
done
# pipeline stages: 8 and 16 micro-batches, one and two chunks a stage, layers by cost and even
for count in 8 16; do
  compare pp-$count 60 $dense 2 $step=$((4 * count)) $micro=4 $parallel.pipeline_model_parallel_size=2 \
    --against bare,bare-best --changes "$best,1 more on the first stage,2 more on the first stage" \
    --variant "ours-even: $parallel.pipeline_split=even" \
    --variant "ours-virtual: $virtual" \
    --variant "ours-virtual-even: $virtual $parallel.pipeline_split=even"
done
balance=$arch.num_layers=12; [ "$size" = 1b ] || balance=$arch.num_layers=2
compare ep 75 $experts 2 $balance $parallel.expert_model_parallel_size=2 --against bare-best \
  --changes "fused router and permutation"
