"""Check `runs`: whole runs with the random model and the same seed, one_step_off twice and sync once."""

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from async_flowrl.benchmark import NOTHING_BUT_TRAINING
from async_flowrl.doctor.findings import FAILED, OK, SKIPPED, Finding
from async_flowrl.doctor.model import overrides
from async_flowrl.doctor.processes import run_within
from async_flowrl.doctor.setting import Setting

FIRST_STEPS = 2
"""Number of first steps that are not timed, because kernels are chosen and memory is allocated in them."""
DETERMINISM = "see the lines on determinism above; where they are ok, the report is worth an issue"


@dataclass(frozen=True)
class Ran:
    """Results of a finished run. `step_seconds` is the median over the steps after `FIRST_STEPS`.

    `publishes` is the number of versions sent. Of those, NCCL failed to bring `fallbacks` and was not used for
    `member_busy`, because a worker was busy with an earlier delivery; the object store brought both.
    """

    digest: str
    step_seconds: float
    images_per_second: float
    publishes: int
    fallbacks: int
    member_busy: int = 0


def check(setting: Setting, seconds: float) -> Iterator[Finding]:
    """Yields findings on the digests of the two runs of one_step_off, on their deliveries, and on the step times."""
    until, ran = time.monotonic() + seconds, {}
    wanted = {"first": "one_step_off", "second": "one_step_off", **({} if setting.quick else {"sync": "sync"})}
    for left, (name, mode) in zip(range(len(wanted), 0, -1), wanted.items(), strict=True):
        made = run(setting, name, mode, (until - time.monotonic()) / left)
        if isinstance(made, Finding):
            yield made
        else:
            ran[name] = made
    if "first" in ran and "second" in ran:
        yield repeats(ran["first"], ran["second"])
        yield collective(ran["first"], setting)
    yield modes(setting, ran)


def run(setting: Setting, name: str, mode: str, seconds: float) -> Ran | Finding:
    """Makes one run by the normal command line in a new process; returns a finding and copies its logs if it fails."""
    folder = setting.folder("runs") / name
    log = Path(setting.logs) / f"run_{name}_{mode}.log"
    if seconds <= 0:
        return Finding(f"run {name}", FAILED, "the check's time was used up before", "run `doctor --gpu --only runs`")
    steps = f"total_steps={setting.sizes.run_steps}"
    given = [*overrides(setting), *NOTHING_BUT_TRAINING, *placed(setting, mode), steps, f"output_dir={folder}"]
    command = [sys.executable, "-m", "async_flowrl.main", "--config-name", mode, *given]
    ended = run_within(command, seconds, log, environment=setting.environment())
    if ended.code != 0:
        if (folder / "logs").is_dir():
            shutil.copytree(folder / "logs", Path(setting.logs) / f"run_{name}_{mode}", dirs_exist_ok=True)
        code = f"exit code {ended.code}: {ended.last_words()}"
        why = f"not done within {seconds:.0f} s" if ended.code is None else code
        return Finding(f"run {name} ({mode})", FAILED, why, f"see {log.name}")
    return read(folder)


def placed(setting: Setting, mode: str) -> Sequence[str]:
    """Returns the overrides that place the workers.

    With two devices each pool has one, and NCCL sends the weights. With one device, one process of sync samples and
    trains, and the two pools of one_step_off share it, half for each. With `--quick` workers are threads of one
    process, because most of the time would go to starting Ray.
    """
    workers = ("rollout.num_workers=1", "trainer.num_workers=1")
    if setting.quick:
        return (*workers, "checkpoint_engine.transport=object_store", "runtime.backend=local")
    if setting.devices > 1:
        return (*workers, "checkpoint_engine.transport=nccl")
    store = (*workers, "checkpoint_engine.transport=object_store")
    if mode == "sync":
        return (*store, "placement=shared")
    return (*store, "rollout.gpus_per_worker=0.5", "trainer.gpus_per_worker=0.5")


def read(folder: Path) -> Ran:
    """Reads the results of a finished run."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line["timing/step"] for line in lines if "timing/step" in line]
    middle = median(steps[FIRST_STEPS:] or steps)
    images = summary["images"] / summary["steps"]
    sync = summary["sync"]
    sent = (sync["publishes"], sync.get("fallbacks", 0), sync.get("member_busy", 0))
    return Ran(summary["weights_digest"], middle, images / middle, *sent)


def repeats(first: Ran, second: Ran) -> Finding:
    """Checks that two runs with the same seed end with bitwise equal weights."""
    name, figures = "one_step_off twice", {"digests": [first.digest, second.digest]}
    if first.digest != second.digest:
        sentence = f"the same run ended with other weights: {first.digest[:12]} and {second.digest[:12]}"
        return Finding(name, FAILED, sentence, DETERMINISM, figures)
    return Finding(name, OK, f"both ended with {first.digest[:12]}, bit for bit", figures=figures)


def collective(ran: Ran, setting: Setting) -> Finding:
    """Checks that NCCL sent every version of a run on two devices for which it was used."""
    name = "deliveries of that run"
    if setting.quick or setting.devices < 2:
        why = "with --quick a run is one process" if setting.quick else "one device: versions went by the object store"
        return Finding(name, SKIPPED, why, "NCCL needs two devices, and the check without --quick")
    figures = {"publishes": ran.publishes, "fallbacks": ran.fallbacks, "member_busy": ran.member_busy}
    if ran.fallbacks:
        sentence = f"{ran.fallbacks} of {ran.publishes} versions went by the object store instead of NCCL"
        return Finding(name, FAILED, sentence, "see the log of the run for the warning that says why", figures)
    if ran.member_busy:
        by_nccl, why = ran.publishes - ran.member_busy, "while a worker was busy with an earlier delivery"
        sentence = f"{by_nccl} of {ran.publishes} versions by NCCL, the others by the object store {why}"
        advice = "" if by_nccl else "the run's logs/controller.log names the workers; check again on an idle machine"
        return Finding(name, OK if by_nccl else FAILED, sentence, advice, figures)
    return Finding(name, OK, f"all {ran.publishes} versions by NCCL", figures=figures)


def modes(setting: Setting, ran: dict[str, Ran]) -> Finding:
    """Reports the step times of both modes. On one device one_step_off gains little: both pools compute there."""
    name = "one_step_off against sync"
    if setting.pretended:
        return Finding(name, SKIPPED, "CPU kernels computed this", "needs a real device")
    if "sync" not in ran or "first" not in ran:
        why = "left out by --quick" if setting.quick else "a run of the two is missing"
        return Finding(name, SKIPPED, why, "needs the check without it" if setting.quick else "see above")
    ahead, sync = ran["first"], ran["sync"]
    figures = {mode: each.step_seconds for mode, each in (("one_step_off", ahead), ("sync", sync))}
    where = "separate devices" if setting.devices > 1 else "one device that both pools share, so no gain is expected"
    sentence = (
        f"{ahead.step_seconds:.2f} s per step ({ahead.images_per_second:.3g} images/s) against {sync.step_seconds:.2f} "
        f"({sync.images_per_second:.3g}), {sync.step_seconds / ahead.step_seconds:.2f} times as fast, on {where}"
    )
    return Finding(name, OK, sentence, figures=figures)
