#!/usr/bin/env bash
# The figures of docs/reliability.md for GPUs: the cost of hashes, asynchronous saves, repeatable runs; one GPU, about five minutes.
#   bash scripts/benchmark/gpu_reliability.sh [FOLDER_ON_DISK] [KEY=VALUE ...]
# The output goes to $OUT (default outputs/gpu_reliability) as well, a file for each part; a part that ends at its time limit
# keeps what it has printed. KEY=VALUE changes the model, the 1.5B Llama with 4 of its 16 layers (0.8B parameters, 10 GiB).
set -u
cd "$(dirname "$0")/../.."
out=${OUT:-outputs/gpu_reliability}; mkdir -p "$out"
disk=${1:-${TMPDIR:-/tmp}}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} CONSOLE_LOG_LEVEL=${CONSOLE_LOG_LEVEL:-WARNING} PYTHONUNBUFFERED=1
status=0
part() {  # NAME SECONDS COMMAND...
  echo "== $1"
  timeout -k 5 "$2" "${@:3}" 2>"$out/$1.log" | tee "$out/$1.txt"
  [ "${PIPESTATUS[0]}" -eq 0 ] || { echo "FAILED $1"; tail -n 15 "$out/$1.log"; status=1; }
}
model=(--config scripts/benchmark/llama-1b.yaml megatron_lm.model.arch.num_layers=4 "${@:2}")
part cost 180 python3 scripts/benchmark/checkpoint_cost.py --platform "${PLATFORM:-cuda}" --seconds 165 --rounds 3 \
  --folder /dev/shm/checkpoint_cost --folder "$disk/checkpoint_cost" "${model[@]}"
part async-saves 120 python3 -m pytest -q --tb=short -rs tests/gpu/test_async_save_gpu.py
part deterministic 120 python3 -m pytest -q --tb=short -rs tests/gpu/test_training_gpu.py -k deterministic_mode
exit $status
