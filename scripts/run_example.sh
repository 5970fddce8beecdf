#!/usr/bin/env bash
# Train a configuration; the first call sets the environment up.
#   bash scripts/run_example.sh [CONFIG] [a.b.c=value ...]        default: configs/tiny-llama-sft.yaml
# GPUS_PER_NODE (processes on this node; default: the GPUs present, else what the layout needs), NNODES, NODE_RANK,
# MASTER_ADDR and MASTER_PORT go to torchrun. A mistake in the configuration ends with exit code 2 before any process.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment requirements.txt
config=${1:-configs/tiny-llama-sft.yaml}
"$PYTHON" examples/data/build.py
exec "$PYTHON" -m megatron_wrap.cli.main train --script examples/train.py "$config" "${@:2}"
