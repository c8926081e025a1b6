"""Tests of the trainer's layout with `auto`, which comes from the plan that `--memory` prints."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory import footprints
from async_flowrl.memory.devices import MEMORY_WARNING_SHARE
from async_flowrl.memory.footprints import GIB, planned_trainer, trainer_footprint
from async_flowrl.memory.rehearsed import alone, model_sizes
from async_flowrl.memory.trainer_layout import LAYOUT, resolved

Layout = tuple[str, int | None, str]
WHOLE: Layout = ("none", None, "none")
PEAKS = {"none": 16, "every_4": 12, "every_3": 10, "every_2": 8, "full": 2}
"""GiB of activations, in place of counted ones, by what is checkpointed."""


def config(*overrides: str) -> Config:
    return compose_config(
        "one_step_off", ["model.tiny.layers=12", "model.tiny.heads=8", "model.dtype=float32", *overrides]
    )


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Config, Layout], int]:
    """Bytes of the smallest device that a rank of a layout does not fill."""
    model = model_sizes(config())
    monkeypatch.setattr(footprints, "model_sizes", lambda config: model)
    monkeypatch.setattr(footprints, "training_peak", peak)

    def needed(given: Config, wanted: Layout) -> int:
        return int(planned_trainer(laid_out(given, wanted)).total / MEMORY_WARNING_SHARE) + 2

    return needed


def peak(config: Config) -> int:
    lasting = trainer_footprint(alone(config), model_sizes(config)).resident
    return lasting + PEAKS[config.trainer.gradient_checkpointing] * GIB


def laid_out(given: Config, wanted: Layout) -> Config:
    return replace(given, trainer=replace(given.trainer, **dict(zip(LAYOUT, wanted, strict=True))))  # type: ignore[arg-type]


def layout_of(given: Config) -> Layout:
    return given.trainer.shard, given.trainer.shard_size, given.trainer.gradient_checkpointing


def layout(given: Config, device_bytes: int) -> Layout:
    return layout_of(resolved(given, {"trainer": device_bytes})[0])


@pytest.mark.extended
def test_as_few_blocks_are_checkpointed_as_fit(counted: Callable[[Config, Layout], int]) -> None:
    given = config("trainer.gradient_checkpointing=auto")
    for how in PEAKS:
        wanted = ("auto", None, how)  # of one rank `shard` decides nothing
        found, reason = resolved(given, {"trainer": counted(given, wanted)})
        assert layout_of(found) == wanted
        assert f"trainer.gradient_checkpointing=auto is {how}: " in reason
    least, reason = resolved(given, {"trainer": GIB})
    assert least.trainer.gradient_checkpointing == "full" and "nothing fits" in reason
    assert layout(given, 1 << 20)[2] == "full", "not even the weights fit"


@pytest.mark.extended
def test_ranks_share_the_base_where_nothing_else_fits(counted: Callable[[Config, Layout], int]) -> None:
    given = config("trainer.num_workers=2")
    whole = counted(given, WHOLE)
    assert whole > 16 * GIB, "activations count"
    assert layout(given, whole)[0] == "none"
    found, reason = resolved(given, {"trainer": whole - 5})
    assert layout_of(found) == ("full", None, "none") and "trainer.shard=auto is full" in reason
    by_node = config("trainer.num_workers=4", "trainer.workers_per_node=2")
    shared = layout(by_node, counted(by_node, WHOLE) - 5)
    assert shared[:2] == ("hybrid", 2)
    both = config("trainer.num_workers=2", "trainer.gradient_checkpointing=auto")
    assert layout(both, whole - 5) == ("none", None, "every_4")


@pytest.mark.extended
def test_whole_weights_are_shared_by_all_ranks_where_one_cannot_hold_them() -> None:
    by_node = config("tune=full", "model.tiny.layers=1", "trainer.num_workers=4", "trainer.workers_per_node=2")
    size = planned_trainer(laid_out(by_node, WHOLE)).total
    assert layout(by_node, 2 * size)[0] == "none"
    found = layout(by_node, size // 4)
    assert found[:2] == ("full", None), "hybrid is for a frozen base"
