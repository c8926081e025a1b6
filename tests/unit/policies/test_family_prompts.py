"""Tests of what every model family makes of prompts: encoding, guidance, and prompts that it has no place for."""

import numpy as np
import pytest

from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from tests.support.families import TEXT, N, how, passes_by_length, policy_of
from tests.support.tiny import request


def test_a_prompt_is_encoded_alike_whoever_else_is(policy: PipelinePolicy, family: str) -> None:
    together = policy.encode([TEXT, "blue"])
    for text, found in zip([TEXT, "blue"], together, strict=True):
        (alone,) = policy.encode([text])
        assert found.keys() == alone.keys()
        assert all(found[name].dtype == np.float32 and np.array_equal(found[name], alone[name]) for name in found)
    read, shorter = together[0]["prompt_embeds"], together[1]["prompt_embeds"]
    assert not np.array_equal(read[: len(shorter)], shorter[: len(read)])


@pytest.mark.parametrize("family", ["flux", "qwen_image", "sd3"], indirect=True)
def test_offloaded_text_encoders_are_those_of_the_pipeline_and_change_no_bit(
    plain: PipelinePolicy, family: str
) -> None:
    """The encoders stay on the host while the rest is loaded, and hold the same weights."""
    offloaded = policy_of(family, parts="offload")
    assert len(offloaded.text_encoders) == {"sd3": 3, "flux": 2}.get(family, 1)
    asked = request(N, how=how(family, cfg=4.0))
    one = DiffusersEngine(plain).generate([asked])[0]
    two = DiffusersEngine(offloaded, text_encoder="offload").generate([asked])[0]
    assert np.array_equal(one.images, two.images)
    assert one.trajectory is not None and two.trajectory is not None
    assert np.array_equal(one.trajectory.latents, two.trajectory.latents)


def test_guidance_makes_as_many_passes_for_every_prompt(plain: PipelinePolicy) -> None:
    """Ranks that share a base by FSDP2 would wait for ever for one that makes fewer."""
    assert len(set(passes_by_length(plain))) == 1
