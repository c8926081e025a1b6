"""Program that starts the engine with one family after another and prints, as JSON, the differences from diffusers."""

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from async_flowrl.config.resolution import Resolution
from async_flowrl.policies.lora import lora_layers, lora_modules
from async_flowrl.types import Prompt, RolloutRequest
from checkpoint_engine import LoraModule, base_digest, binding_probe, check_binding
from tests.support.tiny import request, sampling
from tests.vllm_omni.rig import TOLERANCE, Rig, gap, same, trajectory_of

PROMPTS = (Prompt(0, "a very long prompt about a blue square and more", negative="grey"), Prompt(1, "a hill"))


SIZES: tuple[Resolution, ...] = ((32, 64), (96, 32), (64, 96))


def of_a_size(rig: Rig, ticket: RolloutRequest, size: Resolution) -> float:
    """Returns how far a ticket of this size is from diffusers; infinite if its images have another one."""
    asked = replace(ticket, sampling=replace(ticket.sampling, resolution=size))
    made, expected = rig.made(asked, 1), rig.expected(asked, 1)
    return gap(made, expected) if made.images.shape[1:3] == size else float("inf")


def findings(rig: Rig, family: str) -> dict[str, Any]:
    """Latents, log-probs, images and embeddings; alone and two tickets in a batch; guided and not; three shapes."""
    found: dict[str, Any] = {"family": family}
    weights = {name: weight for name, weight in rig.policy.transformer.named_parameters() if ".lora_" not in name}
    found["same_base"] = rig.base_digest == base_digest({n.replace(".base_layer", ""): w for n, w in weights.items()})
    guidance = 3.5 if family == "flux" else 0.0
    for cfg in (1.0, 4.0):
        tickets = [
            replace(request(2, how=replace(sampling(cfg=cfg), guidance_scale=guidance), prompt=prompt), ordinal=i)
            for i, prompt in enumerate(PROMPTS)
        ]
        made, expected = ([one(ticket, 1) for ticket in tickets] for one in (rig.made, rig.expected))
        pairs = list(zip(made, expected, strict=True))
        found[f"gap_{cfg:g}"] = max(gap(a, b) for a, b in pairs)
        found[f"images_{cfg:g}"] = max(int(np.abs(a.images.astype(int) - b.images).max()) for a, b in pairs)
        found[f"same_embeddings_{cfg:g}"] = all(
            np.array_equal(trajectory_of(a).conditioning[name], value)
            for a, b in pairs
            for name, value in trajectory_of(b).conditioning.items()
        )
        together = rig.engine.generate([replace(ticket, version=1) for ticket in tickets])
        found[f"together_{cfg:g}"] = max(gap(a, b) for a, b in zip(made, together, strict=True))
        found[f"again_{cfg:g}"] = same(made[0], rig.made(tickets[0], 1))
        found[f"sizes_{cfg:g}"] = [of_a_size(rig, tickets[0], size) for size in SIZES]
    rig.hold(1)
    layers = lora_layers(lora_modules(rig.policy.transformer))
    check_binding(binding_probe({name: LoraModule(*parts) for name, parts in layers.items()}), rig.engine.probe())
    return found


def check(found: dict[str, Any]) -> None:
    assert found["same_base"], found
    for cfg in (1, 4):
        assert found[f"gap_{cfg}"] < TOLERANCE and found[f"together_{cfg}"] < TOLERANCE, found
        assert all(each < TOLERANCE for each in found[f"sizes_{cfg}"]), found
        assert found[f"images_{cfg}"] <= 1 and found[f"again_{cfg}"] and found[f"same_embeddings_{cfg}"], found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rig = Rig(family=name)
        sys.__stdout__.write(json.dumps(findings(rig, name)) + "\n")
        sys.__stdout__.flush()
        rig.engine.close()
