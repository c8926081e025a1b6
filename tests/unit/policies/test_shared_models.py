"""Tests of the models that tests share: each is built once, and one that a test changes is named."""

import pytest
import torch

from tests.support.shared_models import SharedModels, digests
from tests.support.tiny import request, tiny_policy


def test_a_model_is_built_once_and_reading_it_changes_nothing(shared_models: SharedModels) -> None:
    policy = shared_models.tiny
    assert shared_models.tiny is policy and shared_models.policy("sana") is shared_models.policy("sana")
    assert digests(policy) == digests(tiny_policy())
    assert any("transformer." in name for name in digests(policy)) and any("vae." in name for name in digests(policy))
    policy.encode([request().prompt.text])
    shared_models.check()


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_a_tensor_that_a_test_changes_is_named(part: str) -> None:
    models = SharedModels()
    name, parameter = next(iter(models.policy("sana")._whole("be tested").components[part].named_parameters()))
    models.check()
    with torch.no_grad():
        parameter.flatten()[0] += 1e-3
    with pytest.raises(AssertionError, match=f"changed {part}.{name} of the shared policy of sana$"):
        models.check()


@pytest.mark.parametrize("change", ["cast", "train", "gradient"])
def test_what_a_model_computes_in_and_with_counts_too(change: str) -> None:
    models = SharedModels()
    network = models.pipeline("sana").transformer
    if change == "cast":
        network.to(torch.bfloat16)
    parameter = next(network.parameters())
    if change == "train":
        parameter.requires_grad_(not parameter.requires_grad)
    if change == "gradient":
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(AssertionError, match=r"of the shared pipeline of sana$"):
        models.check()
