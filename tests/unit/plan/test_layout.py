"""What `auto` is in the trainer's layout, by the same plan that `--memory` prints."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.plan import __main__ as command
from async_flowrl.plan import layout
from async_flowrl.plan.devices import TIGHT
from async_flowrl.plan.layout import resolved
from async_flowrl.plan.memory import plan_memory
from async_flowrl.training.messages import Layout

AUTO = ("trainer.gradient_checkpointing=auto", "trainer.micro_batch_size=16", "model.dtype=float32")
WHOLE, HALF, ALL = Layout("none", None, "none"), Layout("none", None, "every_2"), Layout("none", None, "full")


def config(*overrides: str) -> Config:
    sizes = ["model.tiny.layers=4", "model.tiny.heads=8", "lora.rank=1"]
    return compose_config("one_step_off", [*sizes, *overrides])


def needed(given: Config, wanted: Layout) -> int:
    """Bytes of the smallest device that a rank of this layout does not fill."""
    trainer = wanted.applied(given.trainer)
    return int(plan_memory(replace(given, trainer=trainer)).trainer.total / TIGHT) + 1


def test_as_few_blocks_are_checkpointed_as_fit() -> None:
    given = config(*AUTO)
    for wanted in (WHOLE, HALF, ALL):
        named = replace(wanted, shard="auto")  # of one rank it decides nothing
        found = resolved(given, {"trainer": needed(given, named)})
        assert found.layout == named
        (why,) = found.reasons
        assert f"trainer.gradient_checkpointing=auto is {wanted.gradient_checkpointing}: " in why
        assert "activations included" in why
    least = resolved(given, {"trainer": needed(given, replace(ALL, shard="auto")) // 2})
    assert least.layout.gradient_checkpointing == "full" and "nothing fits" in least.reasons[0]


def test_ranks_share_the_base_where_nothing_else_fits_and_activations_count() -> None:
    deep = ("model.tiny.layers=12", "model.dtype=float32", "trainer.micro_batch_size=16")
    given = config("trainer.num_workers=2", *deep)
    whole = needed(given, WHOLE)
    assert resolved(given, {"trainer": whole}).layout.shard == "none"
    found = resolved(given, {"trainer": whole - 2})
    assert found.layout == Layout("full", None, "none") and "with shard=none" in found.reasons[0]
    by_node = config("trainer.num_workers=4", "trainer.workers_per_node=2", *deep)
    shared = resolved(by_node, {"trainer": needed(by_node, WHOLE) - 2}).layout
    assert (shared.shard, shared.shard_size) == ("hybrid", 2)


def test_without_gpus_and_where_nothing_is_auto_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "build_meta_model", lambda config: pytest.fail("planned"))
    found = resolved(config("trainer.num_workers=2", *AUTO), {})
    assert found.layout == WHOLE and "no GPU" in found.reasons[0]
    fixed = config("trainer.shard=full", "trainer.num_workers=2")
    assert resolved(fixed, {"trainer": 1}) == layout.Chosen(Layout("full", None, "none"), ())


def test_a_model_that_cannot_be_planned_gets_what_needs_least(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(config: Config) -> None:
        raise ValueError("no shapes")

    monkeypatch.setattr(layout, "build_meta_model", unknown)
    found = resolved(config("trainer.num_workers=2", *AUTO), {"trainer": 1 << 40})
    assert found.layout == Layout("full", None, "full") and "ValueError: no shapes" in found.reasons[0]


def printed(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert command.main(["--memory", *words]) == 0
    return capsys.readouterr().out


def test_the_plan_says_what_auto_is_and_names_the_cheapest_layout(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["model.tiny.layers=4", "trainer.num_workers=2"]
    said = printed(["trainer.gradient_checkpointing=auto", *tiny], capsys)
    assert "trainer.shard=auto is none and trainer.gradient_checkpointing=auto is none: the cheapest fits" in said
    dearer = printed(["trainer.gradient_checkpointing=full", "trainer.shard=full", *tiny], capsys)
    assert "the cheapest layout is another one; trainer.shard=auto is none" in dearer
    assert "the cheapest layout" not in printed(["trainer.shard=none", *tiny], capsys)
    found = json.loads(printed(["trainer.shard=full", "--json", *tiny], capsys))
    assert found["layout"]["shard"] == "full" and found["cheapest_layout"]["shard"] == "none"
