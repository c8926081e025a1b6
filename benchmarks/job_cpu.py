"""python -m benchmarks.job_cpu [--steps 30] [key=value ...]: CPU seconds per step of a whole job, beside the bare loop.

The job is a run on Ray with all of its processes, Ray's own among them; the bare loop (bare.py) does the same work in
one process. Both are looked at between two steps in the middle, so that start and end do not count.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from async_flowrl.config.compose import compose_config
from async_flowrl.policies.lora import targeted_modules
from async_flowrl.policies.pipeline_family import quiet
from async_flowrl.policies.registry import DTYPES, load_policy
from async_flowrl.run.precheck import precheck
from async_flowrl.run.prepare import prepare
from async_flowrl.tickets.arithmetic import trained_steps
from benchmarks.bare import Bare
from benchmarks.engines import cpu_seconds

WARM_UP_STEPS, POLL_SECONDS = 5, 0.05
QUIET = ("evaluate.before_training=false", "evaluate.every=0", "console=quiet", "monitor.report=false", "save.every=0")


def job(steps: int, overrides: Sequence[str]) -> float:
    """Returns the CPU seconds per step of a whole run."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        command = [sys.executable, "-m", "async_flowrl.main", "--config-name", "one_step_off", *QUIET]
        total = steps + 2 * WARM_UP_STEPS
        with subprocess.Popen([*command, f"total_steps={total}", f"output_dir={folder}", *overrides]) as run:
            root, looks = psutil.Process(run.pid), list[float]()
            for step in (WARM_UP_STEPS, WARM_UP_STEPS + steps):
                while run.poll() is None and done(folder) < step:
                    time.sleep(POLL_SECONDS)
                looks.append(cpu_seconds(root))
    return (looks[1] - looks[0]) / steps


def done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def bare(steps: int, overrides: Sequence[str]) -> float:
    """Returns the CPU seconds per step of the bare loop in this process."""
    torch.set_num_threads(1)
    prepared = prepare(precheck(compose_config("one_step_off", [*QUIET, "output_dir=nowhere", *overrides])))
    config, count = prepared.config, trained_steps(prepared.config)
    policy = load_policy(prepared.model, dtype=prepared.model.dtype, device="cpu", parts="structure")
    targets, dtype = list(targeted_modules(policy.transformer, config.lora, policy)), DTYPES[config.model.dtype]
    side, denoising = config.rollout.resolution, config.rollout.num_inference_steps
    with quiet():
        loop = Bare(prepared.model.path, side, denoising, targets=targets, rank=config.lora.rank, dtype=dtype)
    texts = [prepared.requests.train[index].text for index in range(config.prompts_per_step)]
    began = time.process_time()
    for step in range(steps + 1):
        if step == 1:  # The first warms up.
            began = time.process_time()
        groups = [loop.generate(text, config.group_size)[1] for text in texts]
        loop.update(groups, trained=count, at_once=config.trainer.timesteps_per_forward or count)
    return (time.process_time() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    whole, alone = job(given.steps, given.overrides), bare(given.steps, given.overrides)
    sys.stdout.write(f"job {whole:.3f} CPU s per step, bare loop {alone:.3f}: {whole / alone:.3f} times\n")


if __name__ == "__main__":
    main()
