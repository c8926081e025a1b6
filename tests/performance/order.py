"""Section `order` of tests.performance.ranks: whole runs that train groups as they get ready, or in their order.

`python -m tests.performance.order any|in-order --config-name stream key=value ...` is one such run.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from async_flowrl.controller.replica_calls import now

from async_flowrl.controller.handed import HandedGroup, hand_over
from async_flowrl.controller.trainer import TrainerGroup
from tests.performance.paired import Progress, spread

SETTINGS = (
    "prompts_per_step=8",
    "group_size=8",
    "trainer.micro_batch_size=8",
    "reward.num_workers=4",
    "save.every=0",
    "evaluate.every=0",
    "evaluate.before_training=false",
    "console=quiet",
    "monitor.report=false",
    "~reward.terms.color",
    "+reward.terms={waiting: {name: 'tests.performance.waiting:Waiting'}}",
)
MODES, ORDERS = ("stream", "one_step_off"), ("any", "in-order")
WARM_UP = 2
"""Steps at the start of a run that are not counted."""
RUN_SECONDS = 300.0
"""Time limit of one run. It takes about 40 s on a quiet machine of two cores."""


class RunFailed(RuntimeError):
    """A run ended with an error or was not done within RUN_SECONDS."""


def order(runs: int, steps: int, progress: Progress) -> Iterator[tuple[str, ...]]:
    """Yields rows of the table, one per mode: step time in any order ÷ in order, seconds of both.

    Raises RunFailed.
    """
    for mode in MODES:
        pairs = []
        with tempfile.TemporaryDirectory() as scratch:
            for number in range(runs):
                found = {}
                for each in ORDERS:
                    found[each] = seconds_per_step(mode, each, steps, Path(scratch) / f"{each}-{number}")
                    progress.say(
                        f"{mode}, groups in {each} order, run {number + 1} of {runs}: {found[each]:.2f} s/step"
                    )
                pairs.append((found["any"], found["in-order"]))
        after, before = (median(pair[place] for pair in pairs) for place in (0, 1))
        yield mode, spread([after / before for after, before in pairs]), f"{before:.2f} → {after:.2f} s"


def seconds_per_step(mode: str, how: str, steps: int, folder: Path) -> float:
    """Returns the mean seconds of the steps of a run, without the first WARM_UP. Raises RunFailed."""
    command = [sys.executable, "-m", "tests.performance.order", how, "--config-name", mode, *SETTINGS]
    run = subprocess.Popen(
        [*command, f"total_steps={steps}", f"output_dir={folder}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, said = run.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        run.kill()  # Nothing of a run outlives its driver.
        _, said = run.communicate()
        raise RunFailed(f"{mode}, {how}: not done within {RUN_SECONDS:g} s\n{said}") from None
    if run.returncode:
        raise RunFailed(f"{mode}, {how}: ended with exit code {run.returncode}\n{said}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [line["timing/step"] for line in lines[WARM_UP:]]
    return math.fsum(times) / len(times)


async def in_order(self: TrainerGroup, ctx: Any, step: int, size: int) -> AsyncIterator[Sequence[HandedGroup]]:
    """What `TrainerGroup._ready` was when the groups of a step were trained in the order of their numbers."""
    self._owners.begin(size, now())
    for group in range(size):
        await self._until(ctx, lambda: ctx.table.ready(step, group))  # noqa: B023
        while all(replica.waiting for replica in self._alive):
            self._freed.clear()
            await self._freed.wait()
        yield self._owned(ctx, hand_over(ctx, self.algorithm, step, [group]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a training, with the groups of a step in order if the first argument says so."""
    from async_flowrl import main as program

    how, *words = sys.argv[1:] if arguments is None else arguments
    if how not in ORDERS:
        sys.stderr.write(f"the first argument is one of {', '.join(ORDERS)}, got {how}\n")
        return 2
    if how == "in-order":
        TrainerGroup._ready = in_order  # type: ignore[method-assign, assignment]
    sys.argv = ["async_flowrl.main", *words]
    return program.main()


if __name__ == "__main__":
    sys.exit(main())
