#!/usr/bin/env bash
# Whether a commit runs on this machine's GPUs, in one call of at most nine minutes; docs/gpu-checks.md has the results.
#   bash scripts/gpu_check.sh [one|two|tiny] [pytest arguments]
# one: on one GPU all tests of tests/gpu that need no other, with the ways of a user; two: those that need two GPUs; tiny: the
# ways of a user on CPUs. LIMIT: seconds until what has not begun fails (default 440). PINNED: a folder of wheels of the
# transformers in requirements.txt and of what it needs, with which families are compared, too. Needs pytest, pytest-timeout
# and pytest-xdist. $OUT (default outputs/gpu-check) gets table.txt, the tests' results as XML, and their durations, which
# are copied to tests/gpu/durations.json.
set -u
cd "$(dirname "$0")/.."
list=${1:-one}; shift || true
out=${OUT:-outputs/gpu-check}; mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 CONSOLE_LOG_LEVEL=${CONSOLE_LOG_LEVEL:-WARNING}
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export NCCL_NVLS_ENABLE=0 UB_SKIPMC=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 # no multicast over NVLink
export GPU_CHECK_DEADLINE=$(($(date +%s) + ${LIMIT:-440}))
unset PYTHONDONTWRITEBYTECODE
PYTHON=${PYTHON:-python3}

check() { # NAME PROCESSES PYTEST ARGUMENTS...: a process takes the next test when it has ended one
  "$PYTHON" -m pytest -q -p no:cacheprovider --timeout 100 --tb short -n "$2" --dist load --maxschedchunk 1 \
    --junitxml "$out/$1.xml" "${@:3}" > "$out/$1.log" 2>&1
  local code=$?
  # a pytest that ends otherwise than with passed or failed tests may have left no results
  [ $code -le 1 ] || echo "$1: pytest ended with exit code $code; see $out/$1.log" >> "$out/incomplete"
}

rm -f "$out"/*.xml "$out/incomplete"
case $list in
  one)
    if [ -n "${PINNED:-}" ]; then
      pinned=$(mktemp -d)
      "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$pinned" "$PINNED"/*.whl
      PYTHONPATH=$pinned:$PYTHONPATH check pinned 3 -m "not gpus" tests/gpu/test_bridge_gpu.py "$@" &
    fi
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} check tests "${PROCESSES:-10}" -m "not gpus" tests/gpu "$@"
    wait
    ;;
  two) check tests "${PROCESSES:-12}" -m gpus tests/gpu "$@" ;;
  tiny) CUDA_VISIBLE_DEVICES= check ways "${PROCESSES:-2}" -m "" --timeout 600 tests/gpu/test_user_ways.py "$@" ;;
  *) echo "$list: one, two or tiny" >&2; exit 2 ;;
esac
"$PYTHON" scripts/gpu_check_table.py "$out" | tee "$out/table.txt"
code=${PIPESTATUS[0]}
[ ! -e "$out/incomplete" ] || { cat "$out/incomplete"; code=1; }
exit "$code"
