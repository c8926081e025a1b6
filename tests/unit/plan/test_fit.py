"""Tests of `async-flowrl plan --fit`: the recipes that fit a machine, and the pool sizes that it tries."""

import json
import shlex
from collections.abc import Sequence

import pytest

from async_flowrl.cli import plan as planner
from async_flowrl.cli import plan_fit as fit
from async_flowrl.cli.plan_fit import Answer, Hardware, candidates, layouts, splits, staffs
from async_flowrl.config.check import check
from async_flowrl.config.compose import compose_config
from async_flowrl.config.pools import scoring_pools
from async_flowrl.config.schema import Config
from async_flowrl.memory import devices
from async_flowrl.memory.devices import gpus_by_pool, gpus_taken, reward_seats
from async_flowrl.memory.layout import Chosen
from async_flowrl.memory.processes import Footprint
from async_flowrl.training.messages import Layout

GIB = 2**30
PICK = "+evaluate.reward.terms={pick: {name: pickscore, workers: 2, gpus_per_worker: 1}}"
"""A held-out judge with two GPUs of its own."""


def words_of(experiment: str, *overrides: str) -> list[str]:
    return [f"experiment={experiment}", *overrides]


def plain(experiment: str, *overrides: str) -> Config:
    return compose_config("one_step_off", words_of(experiment, *overrides))


def answer(experiment: str, kind: Hardware, overrides: Sequence[str] = ()) -> Answer:
    return fit.answer(words_of(experiment, *overrides), kind)


@pytest.fixture(autouse=True)
def sized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Footprints are given, in GiB: what saves memory is only the micro-batch."""

    def trainer(config: Config, *, lasting: bool = False) -> Footprint:
        return Footprint({"all": (10 + 4 * config.trainer.micro_batch_size) * GIB})

    for module in (fit, devices):
        monkeypatch.setattr(module, "planned_trainer", trainer)
        monkeypatch.setattr(module, "planned_rollout", lambda config, **_: Footprint({"all": 16 * GIB}))
    monkeypatch.setattr(fit, "resolved", lambda config, memory: Chosen(Layout.named(config.trainer), ()))


def test_the_table_gives_the_first_command_that_fits_or_what_is_missing() -> None:
    found = {kind.name: answer("sd35_ocr", kind) for kind in map(Hardware.of, fit.HARDWARE)}
    assert found["4x80"].words == ("--config-name one_step_off", "experiment=sd35_ocr")
    assert found["2x24"].fits and found["2x24"].words[-1] == "trainer.micro_batch_size=1"
    assert not found["1x24"].fits and found["1x24"].missing > 5
    assert "placement=shared" in found["1x80"].words
    page = fit.markdown(list(found.values()))
    assert "| `sd35_ocr` | 1x24 | **no**: " in page and "\nasync-flowrl train --config-name one_step_off" in page


@pytest.mark.parametrize(("name", "gib", "devices"), [("4x24", 23.7, 4), ("2x8x80", 79, 16), ("1X141", 139.2, 1)])
def test_cards_are_named_as_they_are_sold(name: str, gib: float, devices: int) -> None:
    assert (Hardware.of(name).gib, Hardware.of(name).devices) == (gib, devices)


@pytest.mark.parametrize("name", ["24", "4x", "0x24", "4xA100", "1x2x3x4"])
def test_other_names_of_cards_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(["--fit", "--cards", name]) == 2
    assert repr(name) in capsys.readouterr().err


def test_what_is_missing_is_missing_of_a_share_of_a_device() -> None:
    """Each kind of process has its own share, and the one that lacks most is named."""
    clip = "+reward.terms.clip={name: clip_score, options: {batch_size: 400}}"  # 1.6 GiB of weights, 6.5 of activations
    words = ["experiment=sd35_ocr", "trainer.micro_batch_size=1", clip]
    kind, rollout = Hardware("1x24", 24, 1), Footprint({"all": 16 * GIB}).total / GIB

    def lacks(rollout_share: float, reward_share: float) -> tuple[float, str]:
        shares = [f"rollout.gpus_per_worker={rollout_share}", f"reward.gpus_per_worker={reward_share}"]
        config = compose_config("one_step_off", [*words, *shares])
        found = fit.judged("sd35_ocr", kind, words, config)
        assert found.fits == (found.missing <= 0)
        assert found.fits or f"{found.missing:.1f} GiB are missing, {found.lacking} |" in fit.markdown([found])
        return found.missing, found.lacking

    seat = reward_seats(compose_config("one_step_off", [*words, "reward.gpus_per_worker=0.1"]))[0].footprint.total / GIB
    assert lacks(0.5, 0.1) == (pytest.approx(seat - 2.4), "worker of the pool reward")
    assert lacks(0.5, 0.9) == (pytest.approx(rollout - 12), "rollout worker")
    assert lacks(1.0, 0.9)[0] < 0


def test_servers_of_a_judge_have_devices_of_their_own_in_the_table() -> None:
    found = [answer("qwen_image_ocr_vlm", kind) for kind in map(Hardware.of, fit.HARDWARE)]
    words = {one.hardware: one.words for one in found}
    assert words["2x80"] == ()
    for kind in ("4x80", "8x80"):
        assert gpus_taken(compose_config("one_step_off", words[kind][1:])) <= int(kind[0])
    assert "| `qwen_image_ocr_vlm` | 2x80 | **no**: it takes more cards | – | – |" in fit.markdown(found)


def test_one_device_is_shared_with_the_rewards_seat() -> None:
    (words,) = layouts(words_of("flux_pickscore"), plain("flux_pickscore"), 1, {})
    assert placement(words) == "shared"
    assert gpus_taken(composed(words)) == 1 and reward_seats(composed(words))[0].share == 0.1
    assert gpus_taken(compose_config("one_step_off", ["experiment=flux_pickscore"])) == 8


def composed(words: Sequence[str]) -> Config:
    """The configuration that a row of the table names, after the checks of a run."""
    config = compose_config(words[0].removeprefix("--config-name "), words[1:])
    check(config)
    return config


def placement(words: Sequence[str]) -> str:
    return composed(words).placement


def pools(words: Sequence[str]) -> dict[str, int]:
    """The workers of each pool that has GPUs, of a row of the table."""
    return {pool: len(each) for pool, each in gpus_by_pool(composed(words)).items()}


def test_a_held_out_pool_has_its_seats_before_the_others_share_what_is_left() -> None:
    found = {kind.name: answer("sd35_ocr", kind, [PICK]) for kind in map(Hardware.of, fit.HARDWARE)}
    assert pools(found["8x80"].words) == {"trainer": 3, "rollout": 3, "held_out/pick": 2}
    assert pools(found["4x80"].words) == {"trainer": 1, "rollout": 1, "held_out/pick": 2}
    # Three devices would be one too few for both of its workers, and two are too few for two pools beside one.
    three = answer("sd35_ocr", Hardware.of("3x80"), [PICK])
    assert pools(three.words) == {"trainer": 1, "rollout": 1, "held_out/pick": 1}
    assert "evaluate.reward.terms.pick.workers=1" in three.words
    assert pools(found["2x80"].words) == {"shared": 1, "held_out/pick": 1}
    assert not found["1x80"].words
    page = fit.markdown([found["8x80"], found["1x80"]])
    assert "`sd35_ocr` on 8x80, with held_out/pick 2:" in page and "it takes more cards" in page
    typed = page.partition("```bash\n")[2].partition("```")[0]
    assert shlex.split(typed.replace("\\\n", ""))[4:6] == ["experiment=sd35_ocr", PICK], "a shell can read it"
    assert max(map(len, typed.splitlines())) < 90 and "runtime.address=auto" in found["2x8x80"].words
    assert answer("sd35_ocr", Hardware.of("3x80")).seats == ""


def test_workers_that_a_term_takes_from_the_shared_pool_do_not_grow_with_the_devices() -> None:
    """Without `workers` a term's pool has as many as `reward.num_workers`, which is set to that of rollout workers."""
    term = "+evaluate.reward.terms={pick: {name: pickscore, gpus_per_worker: 0.5}}"
    own = "+reward.terms.judge={name: pickscore, gpus_per_worker: 1, workers: 1}"
    overrides = ["reward.num_workers=2", term, own]
    many = answer("sd35_ocr", Hardware.of("2x8x80"), overrides)
    assert pools(many.words) == {"trainer": 7, "rollout": 7, "reward/judge": 1, "held_out/pick": 2}
    assert many.seats == "reward/judge 1, held_out/pick 2 x 0.5"


def test_splits_are_even_and_leave_no_device_idle() -> None:
    usual = plain("sd35_ocr")
    assert splits(usual, 5, {})[:2] == [(2, 3), (3, 2)] and all(sum(split) == 5 for split in splits(usual, 5, {}))
    seated = plain("sd35_ocr", "reward.gpus_per_worker=1")
    # Each rollout worker brings a reward worker with a GPU of its own along.
    assert splits(seated, 8, {}) == [(4, 2), (2, 3), (6, 1)]
    assert splits(seated, 2, {}) == []


def test_one_device_holds_a_held_out_pool_with_a_share() -> None:
    given = "sd35_ocr", "+evaluate.reward.terms={pick: {name: pickscore, workers: 2, gpus_per_worker: 0.1}}"
    recipe = plain(*given)
    plans = [words for staff in staffs(recipe) for words in layouts(words_of(*given), recipe, 1, staff)]
    configs = [composed(words) for words in plans]
    assert [config.placement for config in configs] == ["shared"] * 2
    found = [(config.trainer.gpus_per_worker, config.rollout.gpus_per_worker, gpus_taken(config)) for config in configs]
    assert found == [(0.8, 0.8, 1), (0.9, 0.9, 1)]
    assert [scoring_pools(config)[-1].workers for config in configs] == [2, 1]


def test_one_card_has_one_base_and_several_cards_one_pool_after_the_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 79 GiB holds one base of 50 GiB, not two; the memory of `placement=shared` counts a base once."""
    for module in (fit, devices):
        for side in ("planned_trainer", "planned_rollout"):
            monkeypatch.setattr(module, side, lambda config, **_: Footprint({"base weights": 50 * GIB}))
    one = answer("sd35_ocr", Hardware.of("1x80"))
    assert one.fits and placement(one.words) == "shared"
    tried = list(layouts(words_of("sd35_ocr"), plain("sd35_ocr"), 4, {}))
    assert [placement(words) for words in tried] == ["separate"] * (len(tried) - 1) + ["shared"]
    assert pools(tried[-1]) == {"shared": 4}
    small = answer("sd35_ocr", Hardware.of("1x24"))
    assert not small.fits and small.lacking == "process that samples and trains"


def test_a_recipe_of_one_pool_takes_all_devices() -> None:
    """Each of its processes is a trainer rank and a rollout worker: as a split, they would be half as many."""
    found = {kind.name: answer("qwen_image_8x80gb_shared", kind) for kind in map(Hardware.of, fit.HARDWARE[2:])}
    assert found["8x80"].words == ("--config-name one_step_off", "experiment=qwen_image_8x80gb_shared")
    assert [pools(found[name].words) for name in ("1x80", "2x80", "4x80", "2x8x80")] == [
        {"shared": count} for count in (1, 2, 4, 16)
    ]


def test_fewer_held_out_workers_are_tried_after_everything_that_saves_memory() -> None:
    tried = list(candidates(words_of("sd35_ocr", PICK), plain("sd35_ocr", PICK), 4))
    few = ["evaluate.reward.terms.pick.workers=1" in words for words in tried]
    assert few == sorted(few) and 0 < sum(few) < len(few)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "experiment"),
        (["sd35_ocr", "evaluate.reward.terms.pick.workers=2"], "pick"),
        (["sd35_ocr", PICK.replace("1}}", "1.5}}")], "gpus_per_worker above 1 must be a whole number"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planner.main(["--fit", *words]) == 2
    written = capsys.readouterr().err
    assert written.startswith("async_flowrl: ") and said in written and written.count("\n") == 1


def test_the_command_takes_overrides_of_all_recipes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planner.main(["--fit", "--json", "--cards", "4x80", "sd35_ocr", PICK]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["seats"] == "held_out/pick 2" and PICK in row["words"]
