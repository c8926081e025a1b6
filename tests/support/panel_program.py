"""A program that shows the panel of a run, with made-up steps: `python panel_program.py STEPS SECONDS [WORDS]`.

Each of STEPS steps takes SECONDS. With the word `start`, the phase before the steps takes 2 s; with `crash`, the
program ends with an error at step 14.
"""

import logging
import sys
import time
import warnings
from contextlib import closing

from async_flowrl.config.schema import Config
from async_flowrl.observability.console import open_display, show_what_can_be_shown
from async_flowrl.observability.events import EventLog
from async_flowrl.observability.ledger import PoolLedger


def main() -> None:
    show_what_can_be_shown()
    steps, seconds, *words = int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]
    library = logging.getLogger("a.library")
    library.addHandler(logging.StreamHandler())  # This handler holds the stderr from before the panel.
    logging.basicConfig(format="%(levelname)s: %(message)s")
    config = Config(name="signs", total_steps=steps)
    with closing(open_display(config, held_out=True)) as display:
        display.phase("loading the models")
        if "start" in words:
            time.sleep(2.0)
        pools = PoolLedger(time.monotonic)
        for worker in ("rollout-0", "rollout-1", "trainer-0", "reward-0"):
            pools.enter(worker, "busy" if worker != "rollout-1" else "wait_weights")
        display.watch(pools, events(pools), 1e12)
        for step in range(steps):
            time.sleep(seconds)
            display.log(step, metrics(step))
            if step == 10:
                logging.getLogger("run").warning("step %d: a warning of %s words", step, "very " * 20 + "many")
                library.warning("a library warns, too")
                warnings.warn("and Python itself", stacklevel=1)
                print("a print from somewhere", flush=True)
            if step == 12:
                display.evaluation(6, evaluation())
            if step == 14 and "crash" in words:
                raise RuntimeError("out of luck")
    print("LoRA     runs/signs/lora")


def metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.1 + 0.02 * step,
        "staleness/mean": float(min(step, 1)),
        "images": 32,
        "clip_fraction": 0.125,
        "zero_std_ratio": 0.25,
        "pool/rollout/busy": 0.975,
        "pool/trainer/busy": 0.5,
    }


def evaluation() -> dict[str, float]:
    change = {"reward/mean": 0.83, "reward/change": 0.41, "reward/change_high": 0.46}
    return {**change, "held_out/sharp/mean": 0.5, "held_out/sharp/high": 0.51}


def events(pools: PoolLedger) -> EventLog:
    import tempfile
    from pathlib import Path

    log = EventLog(Path(tempfile.mkdtemp()) / "events.jsonl", time.time, ledger=pools)
    now = time.time()
    log.event("step", step=0, started=now - 10, ended=now)
    log.event("span", worker="trainer-0", name="group", start=now - 9, end=now - 1, flops=4.2e12)
    return log


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.stderr.write("async_flowrl: interrupted\n")
        sys.exit(130)
