"""Tests of the sizes of a model by the headers of its files."""

from dataclasses import replace
from typing import Any

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.memory.footprints import plan_memory
from async_flowrl.memory.model_sizes import Sizes, stored_sizes
from async_flowrl.policies.registry import load_family, resolve_model
from async_flowrl.policies.stored import stored_elements
from tests.support.families import NAMES, how, model_config


def sizes(of: Sizes) -> dict[str, Any]:
    names = (
        "version_bytes",
        "text_bytes",
        "block_bytes",
        "adapter_parameters",
        "itemsize",
        "full",
    )
    counted = {name: getattr(of, name) for name in names}
    return {**counted, "beside": pytest.approx(of.root_bytes, rel=0.01)}


@pytest.mark.parametrize(
    "family", [name if name == "qwen_image" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_the_headers_of_the_files_say_the_sizes_of_the_network(family: str) -> None:
    given = compose_config("one_step_off", ["tune=full", "model.dtype=bfloat16"])
    given.model = replace(model_config(family), dtype="bfloat16")
    given.rollout.guidance_scale = how(family).guidance_scale
    model = resolve_model(given.model)
    stored = stored_elements(model.path, model.revision)
    by_header, real = stored_sizes(given, stored, itemsize=2), plan_memory(given).model
    assert sizes(by_header) == sizes(real) and by_header.adapter_parameters > 0
    assert by_header.root_bytes == pytest.approx(real.root_bytes, rel=0.01)
    # The headers do not say what a family keeps in float32: small tensors, but for a tiny network.
    kept = load_family(model.family).float32_parts()
    assert by_header.base_bytes <= real.base_bytes <= by_header.base_bytes * (1.1 if kept else 1.0)
    assert stored_sizes(replace(given, tune="lora"), stored, itemsize=2).adapter_parameters == 0
