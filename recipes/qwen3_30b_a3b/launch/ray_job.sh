#!/usr/bin/env bash
# Submits the run to a Ray cluster that is already up. NOT RUN YET: see ../README.md.
# Usage: RAY_ADDRESS=http://HEAD:8265 SHARED=/shared/sparkrl ./ray_job.sh [key=value ...]
set -euo pipefail
: "${RAY_ADDRESS:?address of the Ray dashboard, http://HEAD:8265}"
: "${SHARED:?folder that the node sees, with checkpoint, data and runs}"

# The driver runs on a node of the cluster, where `cluster.address=auto` finds Ray; sparkrl is installed there.
exec ray job submit --address "$RAY_ADDRESS" --no-wait -- \
  sparkrl train recipe=qwen3_30b_a3b \
  "model.path=$SHARED/qwen3-30b-a3b" \
  "data.path=$SHARED/data/dapo_math.parquet" \
  "eval.path=$SHARED/data/aime2024.parquet" \
  "output_dir=$SHARED/runs" \
  "$@"
