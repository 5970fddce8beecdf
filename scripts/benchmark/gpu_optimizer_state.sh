#!/usr/bin/env bash
# Memory, time and losses of every optimizer state on one GPU, in at most 175 s.
#   bash scripts/benchmark/gpu_optimizer_state.sh [llama|tiny] [a.b=c ...]     (tiny: the same on a CPU)
# $OUT (default outputs/gpu-optimizer-state) keeps results.json and the log.
set -u
cd "$(dirname "$0")/../.."
shape=${1:-llama} kept=${OUT:-outputs/gpu-optimizer-state}
shift || true
mkdir -p "$kept"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 CONSOLE_LOG_LEVEL=${CONSOLE_LOG_LEVEL:-WARNING}
timeout -k 5 "${LIMIT:-175}" "${PYTHON:-python3}" scripts/benchmark/optimizer_state.py --shape "$shape" \
  --output "$kept/results.json" ${STEPS:+--loss-steps "$STEPS"} "$@" > "$kept/log.txt" 2>&1
code=$?
grep -a '^RESULT' "$kept/log.txt"
echo "exit code $code"
[ $code -eq 0 ] || tail -n 25 "$kept/log.txt"
exit $code
