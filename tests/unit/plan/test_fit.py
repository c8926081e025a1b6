"""Tests of `async-flowrl plan --fit`: the recipes that fit a machine, and the pool sizes that it tries."""

import json
import shlex
from collections.abc import Callable, Sequence

import pytest

from async_flowrl.cli import plan_fit as fit
from async_flowrl.cli.plan_fit import Answer, Hardware, layouts, splits
from async_flowrl.config.check import check
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory import devices
from async_flowrl.memory.devices import applied, gpus_by_pool
from async_flowrl.memory.footprints import Footprint

GIB = 2**30
PICK = "+evaluate.reward.terms={pick: {name: pickscore, workers: 2, gpus_per_worker: 1}}"
"""A held-out judge with two GPUs of its own."""


def plain(*overrides: str) -> Config:
    return compose_config("one_step_off", ["experiment=sd35_ocr", *overrides])


def answer(experiment: str, kind: Hardware, *overrides: str) -> Answer:
    return fit.answer([f"experiment={experiment}", *overrides], kind)


def sizes(
    monkeypatch: pytest.MonkeyPatch, trainer: Callable[..., Footprint], rollout: Callable[..., Footprint] | None = None
) -> None:
    """Footprints are given in place of planned ones; without `rollout` a rollout worker needs nothing."""
    for module in (fit, devices):
        monkeypatch.setattr(module, "planned_trainer", trainer)
        monkeypatch.setattr(module, "planned_rollout", rollout or (lambda config, **_: Footprint({})))


@pytest.fixture(autouse=True)
def sized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Footprints are given, in GiB: what saves memory is only the micro-batch."""

    def trainer(config: Config, *, lasting: bool = False) -> Footprint:
        return Footprint({"all": (10 + 4 * config.trainer.micro_batch_size) * GIB})

    sizes(monkeypatch, trainer, lambda config, **_: Footprint({"all": 16 * GIB}))
    monkeypatch.setattr(fit, "resolved_on", lambda config, memory: (config, ""))


def test_the_table_gives_the_first_command_that_fits_or_what_is_missing() -> None:
    found = {kind.name: answer("sd35_ocr", kind) for kind in map(Hardware.of, fit.HARDWARE)}
    assert found["4x80"].words == ("--config-name one_step_off", "experiment=sd35_ocr")
    assert found["2x24"].fits and found["2x24"].words[-1] == "trainer.micro_batch_size=1"
    assert not found["1x24"].fits and found["1x24"].missing > 5
    assert "placement=shared" in found["1x80"].words
    page = fit.markdown(list(found.values()))
    assert "| `sd35_ocr` | 1x24 | **no**: " in page and "\nasync-flowrl train --config-name one_step_off" in page


def composed(words: Sequence[str]) -> Config:
    """The configuration that a row of the table names, after the checks of a run."""
    config = compose_config(words[0].removeprefix("--config-name "), words[1:])
    check(config)
    return config


def pools(words: Sequence[str]) -> dict[str, int]:
    """The workers of each pool that has GPUs, of a row of the table."""
    return {pool: len(each) for pool, each in gpus_by_pool(composed(words)).items()}


@pytest.mark.extended
def test_a_held_out_pool_has_its_seats_before_the_others_share_what_is_left() -> None:
    names = ("1x80", "2x80", "8x80")
    found = {name: answer("sd35_ocr", Hardware.of(name), PICK) for name in names}
    assert pools(found["8x80"].words) == {"trainer": 3, "rollout": 3, "held_out/pick": 2}
    # Three devices would be one too few for both of its workers, and two are too few for two pools beside one.
    three = answer("sd35_ocr", Hardware.of("3x80"), PICK)
    assert pools(three.words) == {"trainer": 1, "rollout": 1, "held_out/pick": 1}
    assert "evaluate.reward.terms.pick.workers=1" in three.words
    assert pools(found["2x80"].words) == {"shared": 1, "held_out/pick": 1}
    assert not found["1x80"].words
    typed = fit.markdown([found["8x80"], found["1x80"]]).partition("```bash\n")[2].partition("```")[0]
    assert shlex.split(typed.replace("\\\n", ""))[4:6] == ["experiment=sd35_ocr", PICK], "a shell can read it"


def test_splits_are_even_and_leave_no_device_idle() -> None:
    usual = plain()
    assert splits(usual, 5, {})[:2] == [(2, 3), (3, 2)] and all(sum(split) == 5 for split in splits(usual, 5, {}))
    seated = plain("reward.gpus_per_worker=1")
    # Each rollout worker brings a reward worker with a GPU of its own along.
    assert splits(seated, 8, {}) == [(4, 2), (2, 3), (6, 1)]
    assert splits(seated, 2, {}) == []


@pytest.mark.extended
def test_one_card_has_one_base_and_several_cards_one_pool_after_the_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 79 GiB holds one base of 50 GiB, not two; the memory of `placement=shared` counts a base once."""
    sizes(monkeypatch, *[lambda config, **_: Footprint({"base weights": 50 * GIB})] * 2)
    one = answer("sd35_ocr", Hardware.of("1x80"))
    assert one.fits and composed(one.words).placement == "shared"
    tried = [applied(change, plain()) for change in layouts(plain(), Hardware.of("4x80"))]
    assert [config.placement for config in tried] == ["separate"] * (len(tried) - 1) + ["shared"]
    assert tried[-1].trainer.num_workers == tried[-1].rollout.num_workers == 4
    small = answer("sd35_ocr", Hardware.of("1x24"))
    assert not small.fits and small.lacking == "process that samples and trains"


def test_a_model_without_a_recipe_has_its_familys_values(capsys: pytest.CaptureFixture[str]) -> None:
    fit.main(["--json", "--cards", "2x80", "model=tiny_wan21", "rollout.frames=5", "reward=sharpness"])
    (row,) = json.loads(capsys.readouterr().out)
    assert row["fits"] and row["experiment"] == "model=tiny_wan21"
    assert row["words"][1:4] == ["model=tiny_wan21", "rollout.frames=5", "reward=sharpness"]


def test_a_recipe_is_also_named_as_train_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    fit.main(["--json", "--cards", "1x80", "experiment=glyphs"])
    (row,) = json.loads(capsys.readouterr().out)
    assert row["experiment"] == "glyphs" and row["words"].count("experiment=glyphs") == 1


@pytest.mark.extended
def test_a_quantised_base_then_host_memory_then_a_lower_rank_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 30 GiB, 16 are the base, 8 lie in host memory if that is asked for, and half of the rest is the rank's."""

    def needed(config: Config, **_: object) -> Footprint:
        stored = {None: 16.0, "int8": 8.0, "nf4": 4.0}[config.model.quantize]
        on_device = [config.trainer.versions_on, config.trainer.sum_on].count("device") * 4.0
        return Footprint({"all": round((stored + on_device + 6.0 * config.lora.rank / 64) * GIB)})

    sizes(monkeypatch, needed)
    found = [answer("qwen_image_ocr", Hardware(str(gib), gib, 1)) for gib in (36, 27.5, 23, 18, 14, 11, 8, 6)]
    stored = [row.fits and set(row.words) & {"model.quantize=int8", "model.quantize=nf4"} for row in found]
    assert stored == [set(), {"model.quantize=int8"}, *[{"model.quantize=nf4"}] * 5, False]
    assert [sum(word.endswith("=host") for word in row.words) for row in found[2:6]] == [0, 2, 3, 3]
    loras = [composed(row.words).lora for row in found]
    assert [lora.rank for lora in loras] == [64] * 5 + [32, 16, 16]
    assert all(lora.alpha == 2 * lora.rank for lora in loras)


def test_of_whole_weights_the_settings_of_a_small_card_are_tried_without_those_of_a_frozen_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes(monkeypatch, lambda config, **_: Footprint({"all": (10 if config.trainer.sum_on == "host" else 30) * GIB}))
    row = answer("sd35_ocr", Hardware.of("1x24"), "tune=full")
    assert row.fits and {"trainer.sum_on=host", "model.quantize_text_encoder=int8"} <= set(row.words)
    assert not [word for word in row.words if word.startswith(("model.quantize=", "lora."))]


@pytest.mark.extended
def test_the_largest_recipe_is_the_first_that_fits_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes(monkeypatch, lambda config, **_: Footprint({"all": (18 if config.model.quantize == "nf4" else 60) * GIB}))
    cards = ((79.0, 2), (23.5, 4), (15.5, 1))
    found = [fit.largest(Hardware("", gib, count)) for gib, count in cards]
    names = ["qwen_image_ocr", "qwen_image_1x24gb", None]
    assert [row and row.experiment for row in found] == names
    four = found[1]
    assert four is not None and composed(four.words).trainer.num_workers == 4
    assert "experiment=qwen_image_1x24gb" in shlex.split(four.command)


def test_rewards_on_one_small_card_have_the_share_that_their_models_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("planned_trainer", "planned_rollout"):
        monkeypatch.setattr(fit, name, lambda config: Footprint({}))
        monkeypatch.setattr(devices, name, lambda config, **_: Footprint({"all": 5 * GIB}))
    found = answer("flux_pickscore", Hardware("1x24", 23.5, 1))
    config = composed(found.words)
    assert found.fits and config.reward.gpus_per_worker == 0.25 and config.model.quantize == "int8"
    assert config.trainer.gpus_per_worker == config.rollout.gpus_per_worker == 0.75
