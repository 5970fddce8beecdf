#!/usr/bin/env bash
# The measurements of docs/gpu.md. Each result is a line that starts with RESULT.
#   bash scripts/benchmark/gpu_suite.sh one|two|both|four|packing|speed|choices [OUTPUT_FOLDER]
# one GPU, the layouts of two, both, those of four; on one: sequences of unequal length, other programs on the same work, or
# kernels, FP8, recomputation, offloading and reference models
set -u
cd "$(dirname "$0")/../.."
out=${2:-outputs/gpu}; mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} CONSOLE_LOG_LEVEL=${CONSOLE_LOG_LEVEL:-WARNING}
arch=megatron_lm.model.arch train=megatron_lm.train.common parallel=megatron_lm.model.parallel
run() {  # NAME COMMAND...: results to results.txt, the rest to NAME.log
  "${@:2}" 2>"$out/$1.log" | sed "/^RESULT/!s/^/RESULT $1 /" | tee -a "$out/results.txt"
  [ "${PIPESTATUS[0]}" -eq 0 ] || { echo "FAILED $1"; grep -v -i warn "$out/$1.log" | tail -12; }
}
speed() { run "$1" torchrun --nproc-per-node "$2" --log-dir "$out" scripts/benchmark/train_speed.py --name "$1" "${@:3}"; }
one() {
  run tests timeout 400 python3 -m pytest -q tests/gpu
  for implementation in torch transformer_engine; do
    impl=$arch.transformer_impl=$implementation
    speed tiny-$implementation 1 scripts/benchmark/overhead.yaml --steps 8 $impl
    speed 1b-$implementation-mbs2 1 scripts/benchmark/llama-1b.yaml $impl
    speed 1b-$implementation-mbs4 1 scripts/benchmark/llama-1b.yaml $train.micro_batch_size=4 $impl
    run overhead-$implementation python3 scripts/benchmark/overhead.py scripts/benchmark/llama-1b.yaml --pairs 16 $impl
  done
  for implementation in torch transformer_engine; do
    run generate-$implementation torchrun --nproc-per-node 1 --log-dir "$out" scripts/benchmark/generate_speed.py \
      scripts/benchmark/llama-1b.yaml --name $implementation $arch.transformer_impl=$implementation
  done
  one=($parallel.tensor_model_parallel_size=1 $parallel.context_parallel_size=1)
  run initial-weights-7b python3 scripts/benchmark/initial_weights.py configs/llama2-7b-minimal-mock.yaml "${one[@]}"
}
parity() {  # of the shipped flows, on all layouts that the GPUs here hold
  [ -d examples/data/generated ] || python3 examples/data/build.py > /dev/null
  for flow in mock sft dpo; do
    run parity-$flow python3 -m megatron_wrap.cli.main check-parity configs/tiny-llama-$flow.yaml --platform cuda "$@"
  done
}
two() {
  parity
  for implementation in torch transformer_engine; do
    impl=$arch.transformer_impl=$implementation
    for layout in dp tensor context pipeline; do
      size=(); [ $layout = dp ] || size=($parallel.${layout}_model_parallel_size=2)
      [ $layout != context ] || size=($parallel.context_parallel_size=2)
      speed tiny-$layout-$implementation 2 scripts/benchmark/overhead.yaml --steps 6 --warmup 2 $impl "${size[@]}"
      speed 1b-$layout-$implementation 2 scripts/benchmark/llama-1b.yaml --steps 8 $impl "${size[@]}"
    done
  done
}
both() { two; one; }
packing() {  # a mix of lengths, beside transformers' Trainer
  run packing-tests timeout 400 python3 -m pytest -q tests/gpu/test_packing_gpu.py
  for implementation in transformer_engine torch; do
    run packing-$implementation python3 scripts/benchmark/packing.py scripts/benchmark/llama-1b.yaml --steps 5 \
      --profile packed,budget $arch.transformer_impl=$implementation
  done
  for way in "dynamic 4 32" "varlen 16 8" "varlen 32 4" "flex 16 8"; do
    read -r name size accumulate <<< "$way"
    run trainer-$name-$size timeout 300 python3 scripts/benchmark/packing_trainer.py $name --micro-batch-size $size \
      --accumulate $accumulate
  done
}
speed() {  # beside other programs; each comparison is a run of its own
  local torch="ours-torch: $arch.transformer_impl=torch" dtype=megatron_lm.train.dtype
  run speed-1.5b timeout 560 python3 scripts/benchmark/compare.py 1.5b-4096 --output "$out/1.5b-4096" --rounds 2 --steps 8 \
    --warmup 3 --variant "$torch" --variant "ours-fp8: $dtype.fp8=hybrid $dtype.fp8_recipe=delayed"
  run speed-8b timeout 400 python3 scripts/benchmark/compare.py 8b-layers-4096 --output "$out/8b-layers" --rounds 2 --steps 6 \
    --against trainer,bare-best --variant "$torch"
  run speed-32k timeout 400 python3 scripts/benchmark/compare.py 1.5b-32768 --output "$out/1.5b-32768" --rounds 2 --steps 4 \
    --against trainer,bare-best --variant "$torch"
  run overhead timeout 150 python3 scripts/benchmark/overhead.py scripts/benchmark/llama-1b.yaml $train.micro_batch_size=4 --pairs 8
}
choices() {
  run kernel-tests timeout 120 python3 -m pytest -q tests/gpu/test_kernels_gpu.py tests/gpu/test_log_probs_gpu.py
  run fp8-tests timeout 300 python3 -m pytest -q tests/gpu/test_fp8_gpu.py
  run fp8-loss timeout 300 python3 scripts/benchmark/fp8_loss.py
  run kernels timeout 120 python3 scripts/benchmark/layer_kernels.py
  run memory timeout 400 python3 scripts/benchmark/memory_choices.py
  run second-models timeout 300 python3 scripts/benchmark/reference_models.py
}
four() {
  [ -d examples/data/generated ] || python3 examples/data/build.py > /dev/null
  local te=$arch.transformer_impl=transformer_engine
  for implementation in transformer_engine torch; do  # what agrees or not does not mind company
    run hf-$implementation timeout 400 python3 -m pytest -q -rP --tb=short -k $implementation tests/gpu/test_bridge_gpu.py &
    run generate-$implementation timeout 400 python3 -m pytest -q --tb=short -k $implementation tests/gpu/test_generate_gpu.py &
  done
  for flow in sft dpo; do
    run parity-$flow timeout 400 python3 -m megatron_wrap.cli.main check-parity configs/tiny-llama-$flow.yaml --platform cuda $te &
  done
  run parity-mixtral timeout 400 python3 -m megatron_wrap.cli.main check-parity configs/tiny-mixtral-sft.yaml --platform cuda $te &
  run parity-window timeout 400 python3 -m megatron_wrap.cli.main check-parity configs/tiny-llama-sft.yaml --platform cuda \
    --layouts tp2-sp,cp2 $te "$arch.window_size=[11,0]" &
  wait
  run link-2 torchrun --nproc-per-node 2 scripts/benchmark/link_speed.py
  run link-4 torchrun --nproc-per-node 4 scripts/benchmark/link_speed.py
  run overhead-tp4 torchrun --nproc-per-node 4 --log-dir "$out" scripts/benchmark/overhead.py scripts/benchmark/llama-1b.yaml \
    --pairs 8 $te $parallel.tensor_model_parallel_size=4
  for implementation in transformer_engine torch; do
    for sizes in "1 1 1" "4 1 1" "2 2 1" "2 1 2"; do
      read -r tp pp cp <<< "$sizes"
      speed 1b-tp$tp-pp$pp-cp$cp-$implementation 4 scripts/benchmark/llama-1b.yaml --steps 7 --warmup 3 \
        $arch.transformer_impl=$implementation $parallel.tensor_model_parallel_size=$tp \
        $parallel.pipeline_model_parallel_size=$pp $parallel.context_parallel_size=$cp
    done
  done
}
"${1:-one}"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee -a "$out/results.txt"
