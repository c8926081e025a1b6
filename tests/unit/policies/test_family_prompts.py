"""Tests of what every model family makes of prompts: encoding, guidance, and prompts that it has no place for."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from async_flowrl.policies import pipeline as pipeline_module
from async_flowrl.policies.base import Policy
from async_flowrl.policies.registry import check_prompts_of, resolve_model
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.types import Prompt
from tests.support.families import NEGATIVE, TEXT, N, conditioning, how, latents, model_config, policy_of
from tests.support.tiny import request


def test_guidance_that_the_network_does_not_take_is_refused(policy: Policy, family: str) -> None:
    positive, _ = conditioning(policy)
    x, sigma = latents(policy), torch.ones(N)
    if family == "flux":
        with pytest.raises(ValueError, match=r"guidance_scale must be above 0 for FLUX\.1"):
            policy.velocity(x, sigma, positive, None, replace(how(family), guidance_scale=0.0))
        weak, strong = (
            policy.velocity(x, sigma, positive, None, replace(how(family), guidance_scale=g)) for g in (1.0, 5.0)
        )
        assert (weak - strong).abs().max() > 1e-3
    else:
        with pytest.raises(ValueError, match=r"rollout\.guidance_scale must be 0 for .*, got 3\.5"):
            policy.velocity(x, sigma, positive, None, replace(how(family), guidance_scale=3.5))


def test_a_prompt_is_encoded_alike_whoever_else_is(policy: Policy, family: str) -> None:
    together = policy.encode([TEXT, "blue"])
    for text, found in zip([TEXT, "blue"], together, strict=True):
        (alone,) = policy.encode([text])
        assert found.keys() == alone.keys()
        assert all(found[name].dtype == np.float32 and np.array_equal(found[name], alone[name]) for name in found)
    assert not np.array_equal(together[0]["prompt_embeds"][:5], together[1]["prompt_embeds"][:5])


def test_prompts_that_a_family_has_no_place_for_are_refused_before_a_model_is_loaded(
    policy: Policy, family: str
) -> None:
    model = resolve_model(model_config(family))
    polite, tokenised = Prompt(3, TEXT, system="Paint."), Prompt(4, TEXT, negative_token_ids=(1, 2))
    check_prompts_of(model, [Prompt(0, TEXT, negative=NEGATIVE)])
    if family == "qwen_image":
        check_prompts_of(model, [polite])
        return
    for prompt, message in ((polite, "has no system prompt, prompt 3 "), (tokenised, "prompts as text, prompt 4 ")):
        with pytest.raises(ValueError, match=message):
            check_prompts_of(model, [Prompt(0, TEXT), prompt])
    with pytest.raises(ValueError, match="has no system prompt, got 'Paint'"):
        policy.encode([TEXT], system="Paint")
    with pytest.raises(ValueError, match="takes prompts as text, got 2 token ids"):
        policy.encode([(1, 2)])


def test_guidance_in_two_passes_is_guidance_in_one(policy: Policy, family: str) -> None:
    """On CUDA, for texts of other lengths, the branches go apart and need no mask; a CPU takes them in one batch."""
    sampling = how(family, cfg=4.0)
    positive, negative = conditioning(policy)
    x, sigma = latents(policy), torch.full((N,), 0.7)
    with patch.object(policy, "_network", wraps=policy._network) as network:
        together = policy.velocity(x, sigma, positive, negative, sampling)
        assert network.call_count == 1
        with patch.object(pipeline_module, "apart", return_value=True):
            apart = policy.velocity(x, sigma, positive, negative, sampling)
        assert network.call_count == 3
    assert (apart - together).abs().max() < 1e-5 * max(1.0, together.abs().max().item())
    assert apart.requires_grad == together.requires_grad


def test_offloaded_text_encoders_are_those_of_the_pipeline_and_change_no_bit(plain: Policy, family: str) -> None:
    """The encoders stay on the host while the rest is loaded, and hold the same weights."""
    offloaded = policy_of(family, parts="offload")
    assert len(offloaded.text_encoders) == {"sd3": 3, "flux": 2}.get(family, 1)
    asked = request(N, how=how(family, cfg=4.0))
    one = DiffusersEngine(plain).generate(asked)
    two = DiffusersEngine(offloaded, text_encoder="offload").generate(asked)
    assert np.array_equal(one.images, two.images)
    assert one.trajectory is not None and two.trajectory is not None
    assert np.array_equal(one.trajectory.latents, two.trajectory.latents)
