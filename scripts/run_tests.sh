#!/usr/bin/env bash
# The tests; the first call sets the environment up. docs/testing.md has what each covers and how long it takes.
#   bash scripts/run_tests.sh            lint, types, every feature and every parallel axis at least once
#   bash scripts/run_tests.sh --fast     lint, types, unit tests without transformers and process groups (make fast)
#   bash scripts/run_tests.sh --all      everything, short drills too; below Python 3.12, where pip takes Megatron-Core
#                                        0.16, on 0.19 as well, and checkpoints go from each to the other
#   bash scripts/run_tests.sh [pytest arguments]     only pytest, with them
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment requirements-dev.txt
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
case "$*" in
  "") selected=(-m "not matrix and not drill and not documentation") ;;
  --all) selected=(-m "") ;;
  --fast) ;;
  *) exec "$PYTHON" -m pytest "$@" ;;
esac

status=0 scratch=$(mktemp -d) beside=
trap '[ -z "$beside" ] || kill -- "-$beside" 2> /dev/null; rm -rf "$scratch"' EXIT

part() { # NAME COMMAND...: runs it and keeps what it prints; the next part runs too, whatever this one finds
  local name=$1
  shift
  echo "== $name" >&2
  "$@" 2>&1 | tee "$scratch/$name" || status=1
}

run_beside() { # COMMAND...: runs it at the same time; await_beside prints what it printed
  set -m # a process group of its own, for the trap
  ("$@"; exit "$status") > "$scratch/.beside" 2>&1 &
  beside=$!
  set +m
}

await_beside() {
  wait "$beside" || status=1
  beside=
  cat "$scratch/.beside"
}

lint() {
  "$PYTHON" -m ruff check . && "$PYTHON" -m ruff format --check .
}

types() {
  "$PYTHON" -m mypy
}

distributed() { # PYTEST ARGUMENTS...
  part "distributed tests" "$PYTHON" -m pytest --durations=15 "${selected[@]}" "$@"
}

others() { # PYTEST ARGUMENTS...: all tests but the distributed ones, or those of some folders
  part "other tests" "$PYTHON" -m pytest --durations=10 "${selected[@]}" "$@"
}

on_newer_megatron_core() {
  # the same packages, but for Megatron-Core: its wheel runs on Python 3.11 although its metadata asks for 3.12
  local newer=$PWD/.venv-mcore019
  if [ ! -f "$newer/.installed" ]; then
    "$PYTHON" -m venv "$newer"
    "$PYTHON" -c 'import site; print(site.getsitepackages()[0])' > "$(echo "$newer"/lib/python3*/site-packages)/beside.pth"
    "$newer/bin/python" -m pip install -q --disable-pip-version-check --ignore-requires-python --no-deps \
      --only-binary=:all: megatron-core==0.19.2
    touch "$newer/.installed"
  fi
  # left out: what does not call Megatron-Core, which is the reading of a configuration, and what check-parity reports on a
  # zoo of right and wrong flows. The other unit tests run once for the same reason, but for those of the platform.
  part "distributed tests on 0.19" on_both_paths "$newer/bin/python" -m pytest -p no:cacheprovider --durations=5 \
    tests/distributed tests/unit/platform tests/unit/data/test_indexed.py -m "not one_megatron_core"
  part "checkpoints across versions" on_both_paths across_versions "$newer/bin/python"
}

on_both_paths() { # COMMAND...: the first environment's editable installation is not read through beside.pth
  PYTHONPATH=$PWD "$@"
}

end_to_end() { # NAME PYTEST ARGUMENTS...
  part "end to end: $1" "$PYTHON" -m pytest --durations=10 "${selected[@]}" "${@:2}"
}

unit_and_newer() {
  others tests/unit tests/gpu
  on_newer_megatron_core
  end_to_end readme tests/end_to_end/test_readme.py
}

across_versions() { # NEWER_PYTHON
  local script=tests/distributed/cross_version.py
  "$PYTHON" $script save "$scratch/.older" && "$1" $script load "$scratch/.older" &&
    "$1" $script save "$scratch/.newer" && "$PYTHON" $script load "$scratch/.newer"
}

# ranks wait for each other a third of their time: two runs beside each other end sooner than one after the other
if [ "$*" = --fast ]; then
  run_beside part types types
  part lint lint
  part "fast tests" "$PYTHON" -m pytest --fast tests/unit
elif [ "$*" = --all ] && "$PYTHON" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
  run_beside unit_and_newer # about as long as the rest
  part lint lint
  part types types
  distributed tests/distributed
  end_to_end others tests/end_to_end --ignore tests/end_to_end/test_readme.py
else
  run_beside distributed tests/distributed --ignore-glob "*/test_r*.py" # as long as the rest
  part lint lint
  part types types
  others tests --ignore tests/distributed
  part "distributed tests (r)" "$PYTHON" -m pytest --durations=5 "${selected[@]}" tests/distributed/test_r*.py
fi
echo "waiting for what ran at the same time" >&2
await_beside
echo
"$PYTHON" scripts/test_summary.py "$scratch" "$SECONDS" || status=1
exit "$status"
