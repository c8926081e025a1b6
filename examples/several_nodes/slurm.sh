#!/bin/bash
#SBATCH --job-name=async_flowrl --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
#SBATCH --time=24:00:00 --requeue
# Two nodes of eight 80 GB cards: eight rollout workers, eight trainer ranks. The environment, HF_HOME and output_dir are
# on a file system that both nodes see. time_limit (seconds) ends the run with a checkpoint before Slurm ends the job,
# which then goes back into the queue and on from there. Not run yet.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_NNODES" -- \
  async-flowrl train --config-name one_step_off experiment=qwen_image_ocr rollout.num_workers=8 trainer.num_workers=8 \
  reward.num_workers=8 runtime.address=auto output_dir=runs/qwen_image_ocr resume=auto time_limit=85000
code=$?
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
