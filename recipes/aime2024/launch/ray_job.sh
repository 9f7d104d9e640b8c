#!/usr/bin/env bash
# An evaluation as a job of its own on a Ray cluster, beside a training run or alone. NOT RUN YET on GPUs: see ../README.md.
# Usage: RAY_ADDRESS=http://HEAD:8265 SHARED=/shared/sparkrl ADAPTER=... ./ray_job.sh [key=value ...]
set -euo pipefail
: "${RAY_ADDRESS:?address of the Ray dashboard, http://HEAD:8265}"
: "${SHARED:?folder that every node sees, with checkpoint, data and runs}"
: "${ADAPTER:?run folder or checkpoint, for example \$SHARED/runs/dapo_math/latest/checkpoints/step-000050}"

# The servers go into a placement group of their own: GPUs that a training run holds are never taken.
exec ray job submit --address "$RAY_ADDRESS" --no-wait -- \
  sparkrl eval recipe=aime2024 k=8 \
  "adapter=$ADAPTER" \
  "model.path=$SHARED/muse-spark-open-nvfp4" \
  "eval.path=$SHARED/data/aime2024.parquet" \
  "output_dir=$SHARED/runs" \
  cluster.address=auto \
  "$@"
