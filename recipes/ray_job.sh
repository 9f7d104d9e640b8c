#!/usr/bin/env bash
# Submits a training run to a Ray cluster that is already up. NOT RUN YET: see the recipe's README.md.
# Usage: RAY_ADDRESS=http://HEAD:8265 SHARED=/shared/sparkrl recipes/ray_job.sh RECIPE CHECKPOINT [key=value ...]
# CHECKPOINT is the model's folder under SHARED.
set -euo pipefail
: "${RAY_ADDRESS:?address of the Ray dashboard, http://HEAD:8265}"
: "${SHARED:?folder that every node sees, with checkpoint, data and runs}"
recipe=${1:?recipe, for example dapo_math}
checkpoint=${2:?folder of the checkpoint under SHARED, for example muse-spark-open-nvfp4}
shift 2

# The driver runs on a node of the cluster, where `cluster.address=auto` finds Ray; sparkrl is installed on every node.
exec ray job submit --address "$RAY_ADDRESS" --no-wait -- \
  sparkrl train "recipe=$recipe" \
  "model.path=$SHARED/$checkpoint" \
  "data.path=$SHARED/data/dapo_math.parquet" \
  "eval.path=$SHARED/data/aime2024.parquet" \
  "output_dir=$SHARED/runs" \
  "$@"
