"""Stage `one_card`: NCCL and pynccl between separate processes on ONE card; correctness, not speed.

NCCL refuses two ranks on one card of a host. Here every process is a host of its own (NCCL_HOSTID, set by
host_per_process/sitecustomize.py), and the ranks talk over sockets on the loopback interface.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu_first_hour.sizes import AT_ONCE
from benchmarks.gpu_first_hour.task import Task

HOSTS = Path(__file__).parent / "host_per_process"
PAIR = ("trainer.num_workers=1", "rollout.num_workers=1")
FOUR = ("trainer.num_workers=2", "rollout.num_workers=2", "trainer.shard=full")
RUNS = {
    "object_store": PAIR,
    "nccl": PAIR,
    "pynccl": PAIR,
    "nccl, two ranks under FSDP2": FOUR,
    "nccl, whole weights": (*PAIR, "tune=full", "rollout.versions_on=device"),
}
"""Name of a run, which begins with its transport → its settings."""
DEATH, DELIVERY, REFUSED = "peer dies", "late sender", "one device"
"""Modes of tests/gpu/test_collectives.py."""


def environment(ranks: int) -> dict[str, str]:
    """Returns variables with which `ranks` workers of one GPU each share this machine's card, and NCCL agrees."""
    paths = [str(HOSTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_OVERRIDE_RESOURCES": f'{{"GPU": {ranks}}}',
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        **SOCKETS,
    }


SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "2"}


def one_card(task: Task) -> None:
    """Delivers among three processes, with a receiver that dies and without a host id; then trains over each library.

    The weights of all runs that train a LoRA must be those of the object store, and no version may fall back to it.
    """
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    between_processes(task)

    at_once = min(3, AT_ONCE // 2)

    def train(place: int, name: str) -> Any:
        transport, ranks = name.partition(",")[0], 4 if RUNS[name] is FOUR else 2
        most = task.left / math.ceil((len(RUNS) - place) / at_once)
        settings = (*RUNS[name], f"checkpoint_engine.transport={transport}", "total_steps=8")
        made = task.train(name, *settings, most=most, **environment(ranks))
        if transport != "object_store":
            fallbacks = made["sync"].get("fallbacks") if made else None
            task.say(f"{name}: every version that way", ok=fallbacks == 0, fallbacks=fallbacks)
        return made

    with ThreadPoolExecutor(at_once) as pool:
        made = dict(zip(RUNS, pool.map(train, range(len(RUNS)), RUNS), strict=True))
    task.equal("one digest", {name: run for name, run in made.items() if "tune=full" not in RUNS[name]})


def between_processes(task: Task) -> None:
    """Says what each of three processes (the first one sends) has to say: a digest, an error, or that it died."""
    from tests.gpu import test_collectives as collectives

    collectives.SECONDS = 40.0
    for mode in (DELIVERY, REFUSED, DEATH):
        for transport in ("nccl", "pynccl"):
            own = mode != REFUSED

            def host(number: int, own: bool = own) -> dict[str, str]:
                return {**SOCKETS, "CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": f"card-{number}" if own else "same"}

            try:
                answers = collectives.processes(transport, mode, host)
            except (AssertionError, OSError, EOFError) as error:
                answers = [f"{type(error).__name__}: {error}"]
            task.say(f"{transport}, {mode}", ok=good(mode, answers), answers=[each[:160] for each in answers])


def good(mode: str, answers: list[str]) -> bool:
    """Returns True if the three processes ended as they must: nobody hangs, and nobody has other bytes."""
    if mode == DELIVERY:
        return len(answers) == 3 and len(set(answers)) == 1 and len(answers[0]) == 64
    failed = [each.startswith("TransferFailed: ") for each in answers]
    if mode == REFUSED:
        return len(answers) == 3 and all(failed)
    return len(answers) == 3 and answers[2] == "died" and failed[0] and (failed[1] or len(answers[1]) == 64)
