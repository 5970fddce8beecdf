#!/usr/bin/env bash
# Layouts of two GPUs beside one GPU and the bare loop: tokens/s per GPU of the 1.5B Llama under data, tensor, context and
# pipeline parallelism, of experts under expert parallelism, of 8B layers and in FP8, and profiles.
#   bash scripts/benchmark/gpu_two.sh [1b|tiny]      (tiny: the same commands on two CPU processes)
# The most important first, in at most LIMIT seconds (default 540; tiny 3,600); PARTS="tp cp-8192" measures these alone, and
# PARTS="ep-one ep ep-shared-one ep-shared" the experts.
# One start of the processes measures all, see `compare.py --tasks`. Lines are printed as they come and kept in
# $OUT/results.txt (default outputs/gpu-two), with the report, the profiles and the ends of the logs.
set -u
cd "$(dirname "$0")/../.."
size=${1:-1b} kept=${OUT:-outputs/gpu-two} work=outputs/gpu-two/work
rm -rf "$work"; mkdir -p "$kept" "$work"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 CONSOLE_LOG_LEVEL=${CONSOLE_LOG_LEVEL:-WARNING}
unset CUDA_DEVICE_MAX_CONNECTIONS  # compare.py gives each program the number of hardware queues that it asks for
export NCCL_NVLS_ENABLE=0 UB_SKIPMC=1 NVSHMEM_DISABLE_NVLS=1  # no multicast over NVLink
export KINETO_LOG_LEVEL=99  # the profiler prints its start and end
unset PYTHONDONTWRITEBYTECODE  # else each process compiles the packages that were installed without byte code

arch=megatron_lm.model.arch parallel=megatron_lm.model.parallel common=megatron_lm.train.common dtype=megatron_lm.train.dtype
step=$common.global_batch_size micro=$common.micro_batch_size
tp=$parallel.tensor_model_parallel_size pp=$parallel.pipeline_model_parallel_size cp=$parallel.context_parallel_size
ep=$parallel.expert_model_parallel_size virtual=$parallel.virtual_pipeline_model_parallel_size even=$parallel.pipeline_split=even
torch=$arch.transformer_impl=torch hidden=$parallel.tp_comm_overlap=true plain=$parallel.tp_comm_overlap=false eager=$arch.cuda_graph_impl=none
linear=megatron_wrap.model_provider.linear_cross_entropy=true
if [ "$size" = 1b ]; then
  limit=${LIMIT:-540} seconds=45 platform=(--standby)
  dense=1.5b-4096 wide=8b-layers-4096 experts=moe-30b-a3b-layers-balanced shared=deepseek-v3-layers-balanced
  lengths=(8192 32768) tokens=131072 engine=$arch.transformer_impl=transformer_engine
  fused="Transformer Engine's cross-entropy" buffers=",user buffers" permuted=",fused router and permutation"
  fp8="$dtype.fp8=hybrid $dtype.fp8_recipe=delayed"
  one_layers=4 layers=6  # of experts: what one and two GPUs of 80 GB train, the bare loop too
  memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null | head -1)
  [ "${memory:-0}" -lt 100000 ] || one_layers=8 layers=12
else
  limit=${LIMIT:-3600} seconds=300 platform=(--platform cpu)
  dense=tiny wide=tiny experts=tiny-moe shared=tiny-deepseek
  lengths=(256 512) tokens=1024 engine=$torch
  fused="native fused cross-entropy" buffers="" permuted=""
  fp8=$arch.rotary_base=20000  # products in FP8 need a GPU
  one_layers=2 layers=2
fi
slow=(--timeout $((seconds + 35)))  # a profile's trace is read afterwards
profiled="megatron_wrap.profile.steps=[4,5] megatron_wrap.profile.memory_snapshot=false"

file=$work/tasks.txt; : > "$file"
task() {  # NAME PRESET [options or a.b=c ...]
  [[ " ${PARTS:-$1} " == *" $1 "* ]] || return 0
  { printf '%s:' "$1"; printf ' %q' "${@:2}"; echo; } >> "$file"
}
bare() { flags=(--against bare-best --flags "$1"); }  # the bare loop with these flags, which a search would find
alone=(--against "")
sizes_of() {  # a context of this length
  sizes=(${dense/4096/32768} "$common.seq_length=$1" "$arch.max_position_embeddings=$1" "$micro=1" "$linear")
}
long=(--steps 3)  # of steps of two seconds and more

everything() {
  # One GPU, the reference of all: both train by themselves, side by side
  bare "$fused"
  task one $dense --devices 1 $step=16 $micro=4 "${flags[@]}" --variant "ours-torch: $torch"
  bare "$fused,overlapped communication"
  task dp $dense $step=32 $micro=4 "${flags[@]}" --variant "ours-torch: $torch"
  # Tensor and sequence parallelism
  bare "$fused"
  task tp $dense $step=16 $micro=4 $tp=2 "${flags[@]}" --variant "ours-te: $engine" \
    --variant "ours-torch-plain: $torch $plain $eager"
  bare "$fused$buffers"
  task tp-overlap $dense $step=16 $micro=4 $tp=2 "${flags[@]}" --only-variants \
    --variant "ours-user-buffers: $engine $hidden"
  # Pipeline stages: 8 and 16 micro-batches, one and two chunks a stage, layers by cost and even
  for count in 8 16; do
    many=(); [ $count = 8 ] || many=("${long[@]}")
    task pp-$count $dense $step=$((4 * count)) $micro=4 $pp=2 "${many[@]}" --against bare-best --flags "$fused" \
      --changes "1 more on the first stage,2 more on the first stage" --variant "ours-even: $even"
    task pp-$count-virtual $dense $step=$((4 * count)) $micro=4 $pp=2 $virtual=2 "${many[@]}" --against bare-best \
      --flags "$fused" --variant "ours-even: $even"
  done
  # Context parallelism: one GPU and two, the same tokens per GPU and sequences; exchanges of both layer implementations
  for length in "${lengths[@]}"; do
    sizes_of "$length"
    many=(); [ "$length" -le 8192 ] || many=("${long[@]}")
    task cp-one-$length "${sizes[@]}" --devices 1 $step=$((tokens / length / 2)) "${many[@]}" "${alone[@]}" \
      --variant "ours-torch: $torch"
    bare "$fused,overlapped communication"; [ "$size" = 1b ] || flags=("${alone[@]}")
    task cp-$length "${sizes[@]}" $step=$((tokens / length)) $cp=2 "${many[@]}" "${flags[@]}" --variant "ours-torch: $torch"
    variants=()
    for exchange in p2p all_gather a2a; do
      kind=$parallel.cp_comm_type=$exchange
      variants+=(--variant "ours-$exchange: $kind" --variant "ours-torch-$exchange: $torch $kind")
    done
    task cp-$length-exchanges "${sizes[@]}" $step=$((tokens / length)) $cp=2 "${many[@]}" "${alone[@]}" --only-variants \
      "${variants[@]}"
  done
  # Experts, forced balance
  of_experts "" $experts --variant "ours-eager: $eager" --variant "ours-te: $engine"
  task ep-micro-2 $experts $arch.num_layers=$layers $ep=2 $step=16 $micro=2 "${flags[@]}" "${slow[@]}" \
    --variant "ours-profile: $profiled"
  # Small and large micro-batches, with a profile of tensor parallelism
  task tp-micro $dense $step=16 $micro=2 $tp=2 "${alone[@]}" "${slow[@]}" --variant "ours-torch-plain: $torch $plain $eager" \
    --variant "ours-8: $micro=8" --variant "ours-profile: $micro=4 $profiled"
  # Layers of an 8B model
  bare "$fused"
  task 8b-one $wide --devices 1 $step=8 $micro=2 "${alone[@]}"
  task 8b-tp $wide $step=8 $micro=2 $tp=2 "${flags[@]}"
  task 8b-pp $wide $step=16 $micro=2 $pp=2 --against bare-best --flags "$fused" --changes "1 more on the first stage" \
    --variant "ours-even: $even"
  # FP8
  task fp8-one $dense --devices 1 $step=16 $micro=4 $fp8 "${alone[@]}"
  task fp8-tp $dense $step=16 $micro=4 $tp=2 $fp8 "${alone[@]}"
  task fp8-pp $dense $step=32 $micro=4 $pp=2 $fp8 "${alone[@]}"
  of_experts -shared $shared --variant "ours-eager: $eager"
}

of_experts() {  # -KIND PRESET: one GPU, and two beside the bare loop; the profile has exposed communication and idle time
  task ep$1-one $2 --devices 1 $arch.num_layers=$one_layers $step=8 "${alone[@]}"
  bare "$fused$permuted,overlapped communication"
  task ep$1 $2 $arch.num_layers=$layers $ep=2 $step=16 "${flags[@]}" "${slow[@]}" --variant "ours-profile: $profiled" "${@:3}"
}

everything
"${PYTHON:-python3}" scripts/benchmark/compare.py --tasks "$file" "${platform[@]}" --devices 2 --rounds 1 --warmup 1 --steps 4 \
  --timeout "$seconds" --limit "$((limit - SECONDS))" --output "$work" 2>&1 | tee -a "$kept/results.txt"
code=${PIPESTATUS[0]}
cp "$work/compare.json" "$kept/"
find "$work/run" -name profile.txt -exec tail -n +1 {} + > "$kept/profiles.txt" 2>/dev/null
for log in "$work"/logs/*.log; do echo "==> $log"; tail -c 1000000 "$log"; done > "$kept/logs.txt"
exit "$code"
