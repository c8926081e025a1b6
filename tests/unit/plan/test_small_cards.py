"""Tests of the plan of a quantised base, against the bytes of real tensors, and of the recipes for small cards."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from async_flowrl.cli.cards import CARDS, gib_of
from async_flowrl.cli.plan_memory import all_fit
from async_flowrl.cli.rehearse import BOTH, rehearse
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.devices import changes, processes
from async_flowrl.memory.footprints import rollout_footprint
from async_flowrl.memory.model_sizes import at_largest, stored_sizes
from async_flowrl.memory.rehearsed import model_sizes
from async_flowrl.memory.trainer_layout import resolved_on
from async_flowrl.policies.quantized_layer import FORMATS, QuantizedLinear
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.policies.stored import stored_elements
from tests.support.allocations import Allocations

GIB = 2**30
RECIPES = {"qwen_image_1x24gb": 24, "qwen_image_21_1x24gb": 24, "flux_1x24gb": 24, "sd35_1x16gb": 16}
"""Experiment → GB of its one card."""


def tiny(*overrides: str) -> Config:
    return compose_config("one_step_off", ["model=tiny", "model.tiny.layers=1", "model.tiny.heads=16", *overrides])


@pytest.mark.parametrize(
    "name", [name if name == "nf4" else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_codes_and_scales_are_counted_as_they_are_stored(name: str) -> None:
    config = tiny(f"model.quantize={name}", "model.dtype=bfloat16")
    model = resolve_model(config.model)
    network = load_policy(model, dtype=model.dtype, device="cpu", parts="transformer").transformer
    sizes, plain = model_sizes(config), model_sizes(tiny("model.dtype=bfloat16"))
    assert sizes.base_bytes == sum(parameter.nbytes for parameter in network.parameters()) < 0.6 * plain.base_bytes
    assert sizes.base_parameters == plain.base_parameters
    by_header = stored_sizes(config, stored_elements(model.path, model.revision), itemsize=2)
    assert by_header.base_bytes == pytest.approx(sizes.base_bytes, rel=0.03)


def test_a_quantised_base_is_advised_where_no_cheaper_setting_is_enough() -> None:
    config = tiny("model.dtype=bfloat16", "placement=shared", "rollout.text_encoder=cached")
    process = next(processes(config, lasting=True))
    advised = [list(change.items()) for change in changes(process, config)]
    stored = [advised.index([("model.quantize", name)]) for name in ("int8", "nf4")]
    assert advised.index([("rollout.batch_size", 1)]) < stored[0] < stored[1] < len(advised) - 1
    config.model.quantize = "int8"
    assert not any("model.quantize" in change for change in changes(process, config))


def test_text_encoders_are_counted_with_a_quarter_that_is_not_quantised() -> None:
    config = tiny("model.quantize_text_encoder=int8", "rollout.text_encoder=resident")
    parameters = 1_000_000
    counted = replace(model_sizes(config), text_bytes=0)
    assert rollout_footprint(config, counted).parts["text encoders"] == 0
    elements = replace(stored_elements(resolve_model(config.model).path), text_encoders=parameters)
    assert stored_sizes(config, elements, itemsize=2).text_bytes == pytest.approx(1.25 * parameters, rel=1e-3)


@pytest.mark.parametrize(("name", "most"), [("int8", 2), ("nf4", 4)])
def test_a_layer_makes_its_weights_in_little_memory(name: str, most: int) -> None:
    """Bytes for each; with four bits two of them are gone before the product begins."""
    layer = QuantizedLinear(nn.Linear(1024, 4096, device="meta", dtype=torch.bfloat16), name).to("meta")
    x = torch.empty(1, 1024, device="meta", dtype=torch.bfloat16)
    with Allocations() as counted:
        layer(x)
    assert most - 0.1 < counted.peak / (1024 * 4096) < most + 0.1


def test_a_card_has_what_torch_finds_on_it() -> None:
    assert [gib_of(gb) for gb in (16, 24, 48, 80)] == [15.5, 23.5, 47.4, 79.0]
    assert CARDS["L4"].memory / GIB == pytest.approx(22.1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", list(RECIPES))
def test_the_recipes_fit_their_card_by_plan_and_by_rehearsal(experiment: str) -> None:
    device = gib_of(RECIPES[experiment])
    config, _ = resolved_on(at_largest(compose_config("one_step_off", [f"experiment={experiment}"])), int(device * GIB))
    assert all_fit(config, device)
    both = next(processes(config))
    lasting = sum(size for name, size in both.footprint.parts.items() if name != "activations")
    visiting = model_sizes(config).text_bytes - both.footprint.parts["base weights"]  # It is not rehearsed.
    held = max(rehearse(config, CARDS["RTX4090"]).peaks()[BOTH].peak, lasting + visiting)
    assert lasting < held == pytest.approx(sum(both.footprint.parts.values()), rel=0.05)
