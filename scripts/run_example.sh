#!/usr/bin/env bash
# Train a configuration; the first call sets the environment up.
#   bash scripts/run_example.sh [CONFIG] [a.b.c=value ...]        default: configs/tiny-llama-sft.yaml
# GPUS_PER_NODE (processes on this node; default: one per GPU, without GPUs as many as the layout needs), NNODES,
# NODE_RANK, MASTER_ADDR and MASTER_PORT are passed to torchrun. An error in the configuration is reported before any
# process starts, with exit code 2.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment requirements.txt
config=${1:-configs/tiny-llama-sft.yaml}
"$PYTHON" examples/data/build.py
exec "$PYTHON" -m megatron_wrap.cli.main train "$config" "${@:2}"
