"""Tests of the settings that messages on devices without enough memory name: a user can give each of them."""

from types import SimpleNamespace
from typing import Any

import pytest

from async_flowrl.config.check import check
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.config.shared import SHARED
from async_flowrl.memory.devices import ALL, ONE, ROLLOUT, TRAINER, changes
from async_flowrl.plan.fitting import smaller
from async_flowrl.policies.architectures import KNOWN
from async_flowrl.rollout.vllm_omni.settings import MAX_RANK
from async_flowrl.tickets.arithmetic import check_batching

RECIPES = (
    *("qwen_image_ocr", "qwen_image_ocr_full", "qwen_image_1x80gb", "qwen_image_8x80gb_shared"),
    *("sd35_ocr", "flux_pickscore"),
)
VLLM_OMNI = "rollout.engine"


def network(family: str, **network: Any) -> Any:
    """A model of which only the family and the configuration of its network are known."""
    return SimpleNamespace(family=family, policy=SimpleNamespace(transformer=SimpleNamespace(config=network)))


def model_of(config: Config) -> Any:
    known = KNOWN[config.model.path]
    return network(known.family, **known.transformer)


@pytest.mark.parametrize("mode", ["one_step_off", "sync"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_advised_for_a_recipe_can_be_given_on_the_command_line(recipe: str, mode: str) -> None:
    given = [f"experiment={recipe}"]
    config = compose_config(mode, given)
    processes = (ONE,) if config.placement == SHARED else (TRAINER, ROLLOUT, ALL)
    advised = [change for process in processes for change in smaller(process, config, model_of(config))]
    accepted = {change for change in advised if change.accepted(config)}
    assert len(accepted) >= 3
    for change in accepted:
        composed = compose_config(mode, [*given, *str(change).split()])
        check(composed)
        check_batching(composed)
        assert composed == change.applied(config)


@pytest.mark.parametrize(
    ("family", "sizes", "gpus"),
    [
        ("qwen_image", {"num_attention_heads": 24}, [2, 4, 8]),
        ("sd3", {"num_attention_heads": 38}, [2]),
        ("sana", {"num_attention_heads": 24}, []),
    ],
)
def test_as_many_gpus_as_divide_the_network_are_advised_for_vllm_omni(
    family: str, sizes: dict[str, int], gpus: list[int]
) -> None:
    config = compose_config("one_step_off", [])

    def advised() -> list[Any]:
        found = [each for each in changes(ROLLOUT, config, network(family, **sizes)) if each.key == VLLM_OMNI]
        return [each.applied(config).rollout.gpus_per_worker for each in found]

    assert advised() == gpus
    config.lora.rank = MAX_RANK + 1
    assert advised() == []
