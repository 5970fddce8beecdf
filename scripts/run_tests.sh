#!/usr/bin/env bash
# Lint, types and all tests; the first call sets the environment up. Below Python 3.12, where pip takes Megatron-Core
# 0.16, the distributed tests run again on 0.19, and checkpoints go from each to the other.
#   bash scripts/run_tests.sh [pytest arguments]     with arguments: only pytest, with them
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment requirements-dev.txt
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
if [ $# -gt 0 ]; then exec "$PYTHON" -m pytest "$@"; fi

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
# the ranks of tests/distributed are forked: in a process of their own, before other tests start threads
"$PYTHON" -m pytest --durations=15 tests/distributed
"$PYTHON" -m pytest --durations=10 tests --ignore tests/distributed
if "$PYTHON" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
  # the same packages, but for Megatron-Core: its wheel runs on Python 3.11 although its metadata asks for 3.12
  newer=$PWD/.venv-mcore019
  if [ ! -f "$newer/.installed" ]; then
    "$PYTHON" -m venv "$newer"
    "$PYTHON" -c 'import site; print(site.getsitepackages()[0])' > "$(echo "$newer"/lib/python3*/site-packages)/beside.pth"
    "$newer/bin/python" -m pip install -q --disable-pip-version-check --ignore-requires-python --no-deps \
      --only-binary=:all: megatron-core==0.19.2
    touch "$newer/.installed"
  fi
  export PYTHONPATH=$PWD  # the first environment's editable installation is not read through beside.pth
  # what check-parity says of a zoo of right and wrong flows has nothing of Megatron-Core's
  "$newer/bin/python" -m pytest tests/distributed tests/unit/platform \
    -k "not test_a_wrong_flow and not test_no_right_flow"
  folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
  "$PYTHON" tests/distributed/cross_version.py save "$folder/older"
  "$newer/bin/python" tests/distributed/cross_version.py load "$folder/older"
  "$newer/bin/python" tests/distributed/cross_version.py save "$folder/newer"
  "$PYTHON" tests/distributed/cross_version.py load "$folder/newer"
fi
