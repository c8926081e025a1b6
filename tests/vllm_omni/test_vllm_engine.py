"""Tests of the real vllm-omni on a CPU, in float32, against diffusers: images, trajectories, adapters, failures."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm_omni", reason="vllm-omni is not installed; `make test-vllm-omni` sets an environment up")

from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel

from async_flowrl.algorithms import sde
from async_flowrl.types import Prompt
from tests.support.tiny import request, sampling, tensors, token_ids
from tests.vllm_omni.compare_families import check, findings
from tests.vllm_omni.rig import TOLERANCE, Rig, gap, same, trajectory_of

LONG = Prompt(1, "a very long prompt about a blue square, a red circle and much more", negative="grey")


def test_it_makes_what_diffusers_makes(rig: Rig) -> None:
    check(findings(rig, "qwen_image"))


def test_without_noise_the_latents_and_images_are_those_of_diffusers(rig: Rig) -> None:
    asked = request(4, how=sampling(cfg=4.0), noise_steps=(), prompt=LONG)
    made, expected = rig.made(asked, 1), rig.expected(asked, 1)
    assert gap(made, expected) < TOLERANCE
    assert int(np.abs(made.images.astype(int) - expected.images.astype(int)).max()) <= 1


@pytest.mark.parametrize(("sde_type", "cfg"), [("sde", 1.0), ("sde", 4.0), ("cps", 1.0), ("dance_sde", 1.0)])
def test_the_same_seeds_give_the_same_trajectory_and_log_probs(rig: Rig, sde_type: str, cfg: float) -> None:
    level = 0.8 if sde_type == "cps" else 1.0
    asked = request(4, how=sampling(cfg=cfg, sde_type=sde_type, noise_level=level), noise_steps=(1, 2, 3), prompt=LONG)
    made, expected = rig.made(asked, 2), rig.expected(asked, 2)
    assert trajectory_of(made).log_probs.shape == (4, 3)
    assert gap(made, expected) < TOLERANCE
    assert np.abs(trajectory_of(made).conditioning["prompt_embeds"]).sum() > 0
    for name, value in trajectory_of(expected).conditioning.items():
        assert np.abs(trajectory_of(made).conditioning[name] - value).max() < TOLERANCE


def test_the_trainer_finds_the_log_probs_it_is_told(rig: Rig) -> None:
    """Closed loop: recomputed from the recorded latents by the trainer's own network."""
    found = trajectory_of(rig.made(request(4), 3))
    rig.hold(3)
    latents, sigmas = torch.from_numpy(found.latents), torch.from_numpy(found.sigmas)
    for column, step in enumerate(found.train_steps):
        x, following = (latents[:, found.points.index(at)] for at in (step, step + 1))
        sigma, after = (sigmas[at].expand(len(x)) for at in (step, step + 1))
        with torch.no_grad():
            velocity = rig.policy.velocity(x, sigma, tensors(found.conditioning), None, sampling())
        transition = sde.transition(
            x, velocity, sigma, after, sigma_after_first=sigmas[1], sde_type="sde", noise_level=1.0
        )
        again = sde.log_prob(following, transition, "sde").numpy()
        assert np.abs(again - found.log_probs[:, column]).max() < 1e-6


def test_an_image_of_a_ticket_is_the_image_alone(rig: Rig) -> None:
    whole = request(4)
    together = rig.made(whole, 1)
    for index in range(4):
        alone = replace(
            whole,
            images=(index,),
            initial_seeds=whole.initial_seeds[index : index + 1],
            noise_seeds=whole.noise_seeds[index : index + 1],
        )
        single = trajectory_of(rig.made(alone, 1))
        assert np.abs(single.latents[0] - trajectory_of(together).latents[index]).max() < TOLERANCE


def test_prompts_are_encoded_to_the_reference_bits(rig: Rig) -> None:
    texts = ["red red red red", " ", LONG.text]
    for mine, reference in zip(rig.engine.encode(texts), rig.policy.encode(texts), strict=True):
        assert np.array_equal(mine["prompt_embeds"], reference["prompt_embeds"])


def test_token_ids_are_encoded_as_their_text(rig: Rig) -> None:
    texts = [LONG.text, " ", "a small green hill"]
    words, ids = rig.engine.encode(texts), rig.engine.encode([tuple(token_ids(text)) for text in texts])
    assert all(np.array_equal(a["prompt_embeds"], b["prompt_embeds"]) for a, b in zip(words, ids, strict=True))
    how = sampling(cfg=4.0)
    tokenised = Prompt(
        2, "for rewards", token_ids=tuple(token_ids("a green hill")), negative_token_ids=tuple(token_ids("grey"))
    )
    made = rig.made(request(2, how=how, prompt=tokenised), 1)
    assert same(made, rig.made(request(2, how=how, prompt=Prompt(2, "a green hill", negative="grey")), 1))
    assert gap(made, rig.expected(request(2, how=how, prompt=tokenised), 1)) < TOLERANCE


def test_tickets_of_one_batch_are_what_they_are_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward pass of vllm-omni's network per denoising step for all of them, prompts of other lengths and guidance
    included."""
    rows: list[int] = []
    forward = QwenImageTransformer2DModel.forward

    def counted(self: Any, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        rows.append(len(hidden_states))
        return forward(self, hidden_states, *arguments, **named)

    prompts = [Prompt(0, "red red red red"), LONG, Prompt(2, "a hill")]
    tickets = [
        replace(request(2, how=sampling(cfg=4.0), prompt=prompt), ordinal=ordinal)
        for ordinal, prompt in enumerate(prompts)
    ]
    alone = [rig.made(ticket, 1) for ticket in tickets]
    tickets = [replace(ticket, version=1) for ticket in tickets]
    monkeypatch.setattr(QwenImageTransformer2DModel, "forward", counted)
    together = rig.engine.generate(tickets)
    assert rows == [2 * 3 * 2] * 6
    assert all(gap(one, other) < TOLERANCE for one, other in zip(alone, together, strict=True))
    assert all(same(one, other) for one, other in zip(together, rig.engine.generate(tickets), strict=True))


def test_tickets_asked_for_at_once_stay_apart(rig: Rig) -> None:
    """However many requests wait in the engine, it never puts two into one batch."""
    asked = [replace(request(3), ordinal=ordinal) for ordinal in range(4)]
    alone = [rig.made(ticket, 1) for ticket in asked]
    together: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda t=ticket: together.update({t.ordinal: rig.engine.generate([t])[0]}))
        for ticket in asked
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(together) == [0, 1, 2, 3]
    assert all(same(alone[ordinal], together[ordinal]) for ordinal in together)
