"""Program with a rollout worker whose engine spreads its network over two ranks; prints results as JSON, then waits.

Usage: python -m tests.vllm_omni.two_ranks FAMILY

At the end the process of one rank is killed, and a ticket is asked for.
"""

import json
import multiprocessing
import signal
import sys
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from async_flowrl.policies.lora import lora_layers, lora_modules
from async_flowrl.rollout.vllm_omni import engine_settings
from async_flowrl.rollout.vllm_omni.extension import RolloutWorkerExtension
from checkpoint_engine import LoraModule, base_digest, binding_probe, check_binding
from tests.support.tiny import request, sampling
from tests.vllm_omni.rig import Rig, gap, same


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


def findings(family: str) -> dict[str, Any]:
    rig = of_two_ranks(family)
    weights = {name: weight for name, weight in rig.policy.transformer.named_parameters() if ".lora_" not in name}
    bare = {name.replace(".base_layer", ""): weight for name, weight in weights.items()}
    found: dict[str, Any] = {"same_base": rig.base_digest == base_digest(bare)}
    guidance = 3.5 if family == "flux" else 0.0
    for cfg in (1.0, 4.0):
        asked = request(4, how=replace(sampling(cfg=cfg), guidance_scale=guidance))
        made = rig.made(asked, 1)
        found[f"gap_{cfg:g}"] = gap(made, rig.expected(asked, 1))
        found[f"again_{cfg:g}"] = same(made, rig.made(asked, 1))
    rig.hold(1)
    layers = lora_layers(lora_modules(rig.policy.transformer))
    check_binding(binding_probe({name: LoraModule(*parts) for name, parts in layers.items()}), rig.engine.probe())
    multiprocessing.active_children()[-1].kill()
    try:
        rig.made(asked, 1)
    except Exception as error:
        found["raised"] = type(error).__name__
    return found


if __name__ == "__main__":
    sys.__stdout__.write(json.dumps(findings(sys.argv[1])) + "\n")
    sys.__stdout__.flush()
    time.sleep(3600)
