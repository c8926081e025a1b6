#!/usr/bin/env bash
# A whole run in every mode on a tiny random Qwen-Image, asserting on summary.json.
#
#   NUM_GPUS        devices in all (default 0: CPU); split N_GPU_ROLLOUT : the rest
#   N_GPU_ROLLOUT   devices that generate (default: half of NUM_GPUS, at least 1)
#   MODEL_ID        model.path (default tiny)
#   ALGORITHM       algorithm group (default flow_grpo)
#   MODES           default "sync stream one_step_off fully_async"
#   STEPS           training steps per mode (default 6)
#   PYTHON          interpreter (default .venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-.venv/bin/python}
NUM_GPUS=${NUM_GPUS:-0}
MODEL_ID=${MODEL_ID:-tiny}
ALGORITHM=${ALGORITHM:-flow_grpo}
MODES=${MODES:-sync stream one_step_off fully_async}
STEPS=${STEPS:-6}
OUT=$(mktemp -d)
trap 'rm -rf "$OUT"' EXIT

workers=()
if [ "$NUM_GPUS" -gt 0 ]; then
  rollout=${N_GPU_ROLLOUT:-$((NUM_GPUS / 2 > 0 ? NUM_GPUS / 2 : 1))}
  trainer=$((NUM_GPUS - rollout))
  if [ "$trainer" -lt 1 ]; then
    echo "NUM_GPUS=$NUM_GPUS leaves no device for the trainer beside N_GPU_ROLLOUT=$rollout" >&2
    exit 2
  fi
  workers=("rollout.num_workers=$rollout" "trainer.num_workers=$trainer")
fi

for mode in $MODES; do
  echo "== $mode"
  "$PYTHON" -m async_flowrl.main --config-name "$mode" \
    "model.path=$MODEL_ID" "algorithm=$ALGORITHM" "total_steps=$STEPS" evaluate.every=0 evaluate.images_per_prompt=4 \
    "output_dir=$OUT/$mode" "${workers[@]}"
  "$PYTHON" tests/e2e/check_summary.py "$OUT/$mode" "$mode" "$STEPS"
done
echo "all modes passed"
