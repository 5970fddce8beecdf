#!/usr/bin/env bash
# Lint, types and all tests; the first call sets the environment up. Below Python 3.12, where pip takes Megatron-Core
# 0.16, the distributed tests run on 0.19 too, at the same time, and checkpoints go from each to the other.
#   bash scripts/run_tests.sh [pytest arguments]     with arguments: only pytest, with them
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment requirements-dev.txt
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
if [ $# -gt 0 ]; then exec "$PYTHON" -m pytest "$@"; fi

on_newer_megatron_core() {
  set -euo pipefail
  # the same packages, but for Megatron-Core: its wheel runs on Python 3.11 although its metadata asks for 3.12
  local newer=$PWD/.venv-mcore019
  if [ ! -f "$newer/.installed" ]; then
    "$PYTHON" -m venv "$newer"
    "$PYTHON" -c 'import site; print(site.getsitepackages()[0])' > "$(echo "$newer"/lib/python3*/site-packages)/beside.pth"
    "$newer/bin/python" -m pip install -q --disable-pip-version-check --ignore-requires-python --no-deps \
      --only-binary=:all: megatron-core==0.19.2
    touch "$newer/.installed"
  fi
  export PYTHONPATH=$PWD  # the first environment's editable installation is not read through beside.pth
  # what check-parity says of a zoo of right and wrong flows has nothing of Megatron-Core's
  "$newer/bin/python" -m pytest -p no:cacheprovider tests/distributed tests/unit/platform \
    -k "not test_a_wrong_flow and not test_no_right_flow"
  "$PYTHON" tests/distributed/cross_version.py save "$scratch/older"
  "$newer/bin/python" tests/distributed/cross_version.py load "$scratch/older"
  "$newer/bin/python" tests/distributed/cross_version.py save "$scratch/newer"
  "$PYTHON" tests/distributed/cross_version.py load "$scratch/newer"
}

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
scratch=$(mktemp -d) newer_run=
trap '[ -z "$newer_run" ] || kill -- "-$newer_run" 2> /dev/null; rm -rf "$scratch"' EXIT
if "$PYTHON" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
  # ranks wait for each other a third of their time: two runs beside each other end sooner than one after the other
  set -m  # a process group of its own, for the trap
  echo "the distributed tests run on Megatron-Core 0.19 at the same time; what they say comes at the end" >&2
  on_newer_megatron_core > "$scratch/newer.log" 2>&1 &
  newer_run=$!
  set +m
fi
status=0  # every part runs, whatever an earlier one found
# the ranks of tests/distributed are forked: in a process of their own, before other tests start threads
"$PYTHON" -m pytest --durations=15 tests/distributed || status=$?
"$PYTHON" -m pytest --durations=10 tests --ignore tests/distributed || status=$?
if [ -n "$newer_run" ]; then
  wait "$newer_run" || status=$?
  newer_run=
  echo "on Megatron-Core 0.19:"
  cat "$scratch/newer.log"
fi
exit "$status"
