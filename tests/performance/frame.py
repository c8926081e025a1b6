"""python -m tests.performance.frame [--rounds 3] [--steps 40] [key=value ...]: CPU seconds per step by process.

Small steps, a third of a second alone: whole runs as a user starts them, on Ray and in one process, beside the bare
loops with the same tickets and micro-batches; in turns. What the frame costs is what a run takes beyond the bare loops.
CPU seconds, so that it can be read on a busy machine; `profile.py` has the parts of both pools.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from async_flowrl.benchmark.bare import Bare
from async_flowrl.benchmark.describe import machine_description
from async_flowrl.benchmark.table import as_sentence, markdown_table
from async_flowrl.config.compose import compose_config
from async_flowrl.policies.loading import quiet
from async_flowrl.policies.lora import targeted_modules
from async_flowrl.policies.registry import DTYPES, load_policy
from async_flowrl.run.prepare import Prepared, prepare
from async_flowrl.tickets.arithmetic import trained_steps
from tests.performance.processes import Tree
from tests.performance.start import medians, whole_lines

PROGRAM = "python -m tests.performance.frame"
LOAD = ("experiment=two_prompts", "monitor.report=false", "evaluate.every=0")
RUNS = {
    "one_step_off, Ray": ("mode=one_step_off", "runtime.backend=ray"),
    "one_step_off, one process": ("mode=one_step_off", "runtime.backend=local"),
    "sync, one process": ("--config-name", "sync", "runtime.backend=local"),
}
BARE = "bare loops"
WARM_UP = 8
"""Steps before the first that counts: imports, first shapes, the evaluation before training."""
POLL_SECONDS = 0.05
OUTPUT = "output.txt"


def run_of(overrides: Sequence[str], steps: int, directory: Path) -> dict[str, float]:
    """CPU seconds per step by part, over `steps` steps of a run. Raises RuntimeError for one that fails."""
    out, log = directory / "run", directory / OUTPUT
    total = [f"total_steps={WARM_UP + steps + 2}", f"output_dir={out}"]
    with log.open("wb") as output:
        command = [sys.executable, "-m", "async_flowrl.main", *LOAD, *overrides, *total]
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        tree = Tree(run.pid, out)
        first, before = until(WARM_UP, run, tree, out)
        last, after = until(WARM_UP + steps, run, tree, out)
        run.wait()
    if run.returncode:
        raise RuntimeError(log.read_text())
    return {part: (after[part] - before.get(part, 0.0)) / (last - first) for part in after}


def until(step: int, run: "subprocess.Popen[bytes]", tree: Tree, out: Path) -> tuple[int, dict[str, float]]:
    """Steps in metrics.jsonl, `step` or a few more, and the CPU seconds by part then."""
    while run.poll() is None:
        tree.look()
        metrics = out / "metrics.jsonl"
        done = len(whole_lines(metrics)) if metrics.exists() else 0
        if done >= step:
            return done, tree.by_part()
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the run ended before step {step}:\n{(out.parent / OUTPUT).read_text()}")


class Loops:
    """The bare loops of the same load in this process."""

    def __init__(self, overrides: Sequence[str], directory: Path) -> None:
        prepared = prepare(compose_config(overrides=[*LOAD, *overrides, f"output_dir={directory / 'bare'}"]))
        self.config = prepared.config
        torch.set_num_threads(self.config.rollout.threads)
        self.texts = [prepared.requests.train[index].text for index in range(self.config.prompts_per_step)]
        self.bare = bare_of(prepared)
        self.step()

    def step(self) -> None:
        config, count = self.config, trained_steps(self.config)
        groups = [self.bare.generate(text, config.group_size)[1] for text in self.texts]
        self.bare.update(groups, trained=count, at_once=config.trainer.timesteps_per_forward or count)

    def measure(self, steps: int) -> dict[str, float]:
        """CPU seconds per step."""
        began = time.process_time()
        for _ in range(steps):
            self.step()
        return {BARE: (time.process_time() - began) / steps}


def bare_of(prepared: Prepared) -> Bare:
    config, model = prepared.config, prepared.model
    policy = load_policy(model, dtype=model.dtype, device="cpu", parts="structure")
    with quiet():
        bare = Bare(
            model.path,
            side=config.rollout.resolution,
            steps=config.rollout.num_inference_steps,
            targets=targeted_modules(policy.transformer, config.lora, policy),
            rank=config.lora.rank,
            dtype=DTYPES[model.dtype],
        )
    bare.pipe.set_progress_bar_config(disable=True)
    return bare


def measure(overrides: Sequence[str], rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Run → part → median of rounds, which take the runs and the bare loops in turns."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in (BARE, *RUNS)}
    with tempfile.TemporaryDirectory() as work:
        loops = Loops(overrides, Path(work))
        for index in range(rounds):
            taken[BARE].append(loops.measure(steps))
            for number, (name, chosen) in enumerate(RUNS.items()):
                folder = Path(work) / f"{index}-{number}"
                folder.mkdir()
                taken[name].append(run_of([*chosen, *overrides], steps, folder))
    return {name: medians([{**each, "all": sum(each.values())} for each in runs]) for name, runs in taken.items()}


def markdown(measured: dict[str, dict[str, float]], command: str) -> str:
    bare = measured[BARE]["all"]
    rows = [
        (name, part, f"{1e3 * seconds:.0f}", f"{seconds / bare:.2f}")
        for name, parts in measured.items()
        for part, seconds in sorted(parts.items(), key=lambda item: (item[0] == "all", -item[1]))
        if len(parts) > 2 or part == "all"
    ]
    table = markdown_table(("run", "process", "CPU ms per step", "÷ bare loops"), rows)
    return f"    {command}\n\n{as_sentence(machine_description())}\n\n{table}\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    command = shlex.join([*PROGRAM.split(), *sys.argv[1:]])
    sys.stdout.write(markdown(measure(given.overrides, given.rounds, given.steps), command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
