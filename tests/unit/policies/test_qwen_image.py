"""Tests of the Qwen-Image policy's maths against diffusers' own pipeline."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from torch import Tensor

from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies.lora import lora_parameters
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.policies.registry import resolve_model
from tests.support.shared_models import SharedModels
from tests.support.tiny import RED, adapted_policy, sampling, tensors, token_ids

NEGATIVE = sampling().negative_prompt


@pytest.fixture(scope="module")
def policy(shared_models: SharedModels) -> QwenImagePolicy:
    return shared_models.tiny


@pytest.fixture(scope="module")
def pipeline() -> QwenImagePipeline:
    pipe = QwenImagePipeline.from_pretrained(resolve_model(ModelConfig()).path)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 4, 64, generator=torch.Generator().manual_seed(seed))


def conditioning(policy: QwenImagePolicy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    positive, negative = policy.encode([RED.text, NEGATIVE])
    return tensors(positive), tensors(negative)


def test_a_schedule_of_one_step_is_refused(policy: QwenImagePolicy) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        policy.sigmas(1, 32)


def test_a_system_prompt_replaces_the_templates(policy: QwenImagePolicy, pipeline: QwenImagePipeline) -> None:
    own = pipeline.prompt_template_encode.split("system\n")[1].split("<|im_end|>")[0]
    (plain,), (same,), (other,) = (policy.encode([RED.text], system=system) for system in (None, own, "Paint {badly}."))
    assert np.array_equal(plain["prompt_embeds"], same["prompt_embeds"])
    assert other["prompt_embeds"].shape == plain["prompt_embeds"].shape
    assert not np.allclose(other["prompt_embeds"], plain["prompt_embeds"], atol=1e-3)
    assert np.array_equal(policy.encode([RED.text])[0]["prompt_embeds"], plain["prompt_embeds"])


@pytest.mark.parametrize("text", [RED.text, "", " ", 'a sign "Öl, 10 €" {x}', "word " * 300])
def test_token_ids_are_encoded_as_the_text_that_was_tokenised(policy: QwenImagePolicy, text: str) -> None:
    (words,), (ids,) = policy.encode([text]), policy.encode([tuple(token_ids(text))])
    assert np.array_equal(words["prompt_embeds"], ids["prompt_embeds"])


def test_a_prompt_is_cut_where_the_stock_pipeline_cuts_it(policy: QwenImagePolicy, pipeline: QwenImagePipeline) -> None:
    """`QwenImagePipeline.__call__` takes 512 tokens, its `encode_prompt` alone 1024."""
    usual = inspect.signature(type(pipeline).__call__).parameters["max_sequence_length"].default
    text = " ".join(str(number) for number in range(700))
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt(text, max_sequence_length=usual)
    for wording in (text, tuple(token_ids(text))):
        ours = policy.encode([wording])[0]["prompt_embeds"]
        assert ours.shape[0] == usual and np.allclose(ours, theirs[0].numpy(), atol=1e-5)


def test_guidance_in_one_batch_is_two_forwards_combined_and_rescaled(policy: QwenImagePolicy) -> None:
    positive, negative = conditioning(policy)
    x, sigma, off = latents(2), torch.tensor([0.9, 0.3]), sampling(cfg=1.0)
    with torch.no_grad():
        guided = policy.velocity(x, sigma, positive, negative, sampling(cfg=4.0))
        c = policy.velocity(x, sigma, positive, None, off)
        u = policy.velocity(x, sigma, negative, None, off)
    combined = u + 4.0 * (c - u)
    expected = combined * c.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)
    assert (guided - expected).abs().max() < 1e-5
    assert (guided - combined).abs().max() > 0.01
    with pytest.raises(ValueError, match="needs the negative prompt"):
        policy.velocity(x, sigma, positive, None, sampling(cfg=4.0))
    with pytest.raises(ValueError, match=r"rollout\.guidance_scale must be 0 for Qwen-Image, got 3\.5"):
        policy.check(replace(off, guidance_scale=3.5))


def test_gradients_flow_through_both_branches() -> None:
    """The adapter's derivative of a guided velocity, against central differences along one direction."""
    policy = adapted_policy()
    positive, negative = conditioning(policy)
    x, sigma, how = latents(2), torch.tensor([0.9, 0.3]), sampling(cfg=4.0)
    weight = latents(2, seed=5)
    parameters = lora_parameters(policy.transformer)
    (policy.velocity(x, sigma, positive, negative, how) * weight).sum().backward()
    direction = {
        name: torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        for i, (name, p) in enumerate(parameters.items())
    }
    analytic = sum(float((p.grad * direction[name]).sum()) for name, p in parameters.items() if p.grad is not None)
    values = []
    with torch.no_grad():
        for sign in (1e-3, -2e-3):
            for name, p in parameters.items():
                p.add_(sign * direction[name])
            values.append(float((policy.velocity(x, sigma, positive, negative, how).double() * weight.double()).sum()))
    assert analytic == pytest.approx((values[0] - values[1]) / 2e-3, rel=0.03)
