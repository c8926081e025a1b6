"""Program with a rollout worker whose engine spreads its network over two ranks; prints results as JSON, then waits.

Usage: python -m tests.vllm_omni.two_ranks FAMILY

At the end the process of one rank is killed, and a ticket is asked for.
"""

import json
import multiprocessing
import signal
import sys
import time
from typing import Any
from unittest.mock import patch

import torch

from async_flowrl.rollout.vllm_omni import engine_settings
from async_flowrl.rollout.vllm_omni.extension import RolloutWorkerExtension
from tests.support.tiny import request
from tests.vllm_omni.compare_families import findings
from tests.vllm_omni.rig import Rig


class BusyRank(RolloutWorkerExtension):
    """A rank that handles no SIGTERM, like one inside a collective."""

    def init_device(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().init_device()


def of_two_ranks(family: str) -> Rig:
    # As on a machine with two devices; the ranks themselves speak gloo.
    extension = "tests.vllm_omni.two_ranks.BusyRank"
    with patch.object(torch.cuda, "device_count", lambda: 2), patch.object(engine_settings, "EXTENSION", extension):
        # With 8 heads, two ranks could not share the MLP of Z-Image.
        return Rig(gpus_per_worker=2.0, family=family, heads=6)


def findings_and_a_death(family: str) -> dict[str, Any]:
    rig = of_two_ranks(family)
    found = findings(rig, family)
    *others, last = multiprocessing.active_children()
    found["others"] = [process.pid for process in others if process.is_alive()]
    last.kill()
    try:
        rig.made(request(1), 1)
    except Exception as error:
        found["raised"] = type(error).__name__
    return found


if __name__ == "__main__":
    sys.__stdout__.write(json.dumps(findings_and_a_death(sys.argv[1])) + "\n")
    sys.__stdout__.flush()
    time.sleep(3600)
