#!/bin/bash
#SBATCH --job-name=async_flowrl --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
#SBATCH --time=24:00:00 --requeue --open-mode=append --signal=B:TERM@600
# One run as a Slurm job: `sbatch examples/deploy/slurm/train.sh key=value ...`, in a folder that all nodes see, with
# async-flowrl on the PATH. 600 s before its time is over, the run makes a checkpoint and exits with 75; the job then goes
# back into the queue, and on from there.
set -uo pipefail
words=("$@")
[ $# -gt 0 ] || words=(--config-name one_step_off experiment=qwen_image_ocr rollout.num_workers=8 trainer.num_workers=8
  reward.num_workers=8 output_dir=runs/qwen_image_ocr save.every=10)
read -ra ray_options <<<"${RAY_OPTIONS:-}" # more for `ray start`, such as --temp-dir=/scratch/ray
port=${RAY_PORT:-6379}
export RAY_AUTH_MODE=token # one for this job alone; left to itself, Ray asks for one on some nodes and has none on others
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export RAY_AUTH_TOKEN
run='' asked=''
trap 'asked=yes; [ -z "$run" ] || kill -TERM "$run"' TERM

address_of() { # the one that Slurm uses, else the first that is not loopback
  known=$(scontrol show node --oneliner "$1" | grep -o 'NodeAddr=[^ ]*' | cut -d = -f 2)
  [[ $known =~ ^[0-9.]+$ ]] || known=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" hostname -I | cut -d ' ' -f 1)
  echo "$known"
}
# Ray never hears SIGTERM, which Slurm sends to every process of a job that is preempted: the run ends in order with it.
start_ray() { # Ray gives its raylet 30 s to start: on a busy node it takes a second try
  for _ in 1 2 3; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" env --block-signal=TERM \
      ray start --block --node-ip-address="$(address_of "$1")" "${@:2}" "${ray_options[@]}"
  done &
}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(address_of "${nodes[0]}"):$port
start_ray "${nodes[0]}" --head --port="$port"
for node in "${nodes[@]:1}"; do start_ray "$node" --address="$address"; done

words+=(runtime.address="$address" resume=auto)
async-flowrl doctor "${words[@]}" --nodes "$SLURM_NNODES" # waits for the nodes, and for what cannot start: refuses it
code=$?
if [ "$code" -eq 0 ] && [ -z "$asked" ]; then
  async-flowrl train "${words[@]}" &
  run=$!
  [ -z "$asked" ] || kill -TERM "$run" # it came in between
  wait "$run"
  code=$?
  while kill -0 "$run" 2>/dev/null; do # a signal ends `wait`, not the run
    wait "$run"
    code=$?
  done
elif [ -n "$asked" ]; then
  code=75
fi
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code" # with the job its steps end: Ray, on every node
