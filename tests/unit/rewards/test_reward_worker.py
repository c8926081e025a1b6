"""Tests of the reward worker: the weighted sum, a user's own rewards, and refusals."""

import asyncio
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_flowrl.config.schema import RewardConfig, RewardTerm
from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.composite import combined
from async_flowrl.rewards.registry import REWARDS, build_reward, check_prompts, check_rewards, is_deterministic
from async_flowrl.rewards.worker import RewardWorker
from async_flowrl.types import Failure, Prompt, Scores

PROMPT = Prompt(3, 'red "abc"', target="abc")
IMAGES = np.arange(4, dtype=np.uint8)[:, None, None, None] * np.ones((4, 8, 8, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    sys.modules.pop("own_rewards", None)


def terms(**names: str | RewardTerm) -> RewardConfig:
    return RewardConfig(
        terms={key: RewardTerm(name=f"own_rewards:{t}") if isinstance(t, str) else t for key, t in names.items()}
    )


def own(name: str, weight: float = 1.0, **options: Any) -> RewardTerm:
    return RewardTerm(weight=weight, name=f"own_rewards:{name}", options=options)


def score(config: RewardConfig, *images: np.ndarray[Any, Any]) -> Scores:
    worker = RewardWorker(config, index=0, name="reward-0")
    try:
        return worker.score(PROMPT, *(images or (IMAGES,)))
    finally:
        worker.close()


def test_the_total_is_the_weighted_sum_and_parts_are_unweighted() -> None:
    scores = score(terms(pixel=own("first_pixel", 2.0), level=own("constant", -4.0, value=0.5)))
    assert scores.by_term == {"pixel": (0.0, 1.0, 2.0, 3.0), "level": (0.5,) * 4}
    assert scores.total == (-2.0, 0.0, 2.0, 4.0)


def test_tickets_of_a_group_are_scored_as_one_group_in_order() -> None:
    config = terms(pixel="first_pixel")
    assert score(config, IMAGES[:1], IMAGES[1:3], IMAGES[3:]).total == score(config, IMAGES).total


def test_async_and_plain_rewards_give_one_sum() -> None:
    scores = score(terms(mean="slow_mean", pixel="first_pixel"))
    assert scores.total == (0.0, 2.0, 4.0, 6.0)


def test_terms_run_side_by_side() -> None:
    scores = score(terms(plain="meets_another", asynchronous="meets_another_async"))
    assert scores.total == (3.0,) * 4


def test_an_async_reward_keeps_its_event_loop_between_groups() -> None:
    worker = RewardWorker(terms(judge=own("Judge", bonus=0.5)), index=0, name="reward-0")
    assert [worker.score(PROMPT, IMAGES).total for _ in range(3)] == [(3.5,) * 4] * 3
    worker.close()


def test_spans_cover_the_group_and_each_term() -> None:
    spans = score(terms(mean="slow_mean", pixel="first_pixel")).spans
    assert [span.name for span in spans] == ["score", "score/mean", "score/pixel"]
    assert all(spans[0].start <= span.start <= span.end <= spans[0].end for span in spans)


@pytest.mark.parametrize(
    ("reward", "came_back"),
    [
        ("too_few", r"must return 4 finite numbers, got shape \[1\]"),
        ("one_number", r"got shape \[\]"),
        ("not_a_number", r"got \[nan, nan, nan, nan\]"),
        ("words", r"got \['good'"),
        ("breaks", "ConnectionError: the judge is away"),
        ("breaks_in_a_group", r"failed on prompt .*: ConnectionError: the judge is away$"),
        ("leaves", "SystemExit: 3"),
        ("leaves_async", "SystemExit: 3"),
        ("runs_out", "StopIteration left the reward"),
    ],
)
def test_bad_results_are_refused_by_name(reward: str, came_back: str) -> None:
    scores = score(terms(good="constant", bad=reward))
    failure = scores.failed["bad"]
    assert re.search(came_back, failure.reason) and not failure.final
    assert "reward 'bad'" in failure.reason and PROMPT.text in failure.reason
    # The other term is not lost with it.
    assert (scores.by_term, scores.total) == ({"good": (0.25,) * 4}, (0.25,) * 4)


@pytest.mark.parametrize("reward", ["refuses", "refuses_in_a_group", "RefusesOne"])
def test_a_prompt_that_a_reward_refuses_is_not_asked_of_it_again(reward: str) -> None:
    (failure,) = score(terms(picky=reward)).failed.values()
    assert failure.final and failure.refused and failure.reason == "reward 'picky': such prompts are not scored"


@pytest.mark.parametrize(("required", "kept"), [(True, False), (False, True)])
def test_a_sum_without_a_required_term_is_an_error(required: bool, kept: bool) -> None:
    bad = RewardTerm(name="own_rewards:too_few", required=required)
    reward = build_reward(terms(good="constant", bad=bad))
    with ThreadPoolExecutor(2) as executor, nullcontext() if kept else pytest.raises(RewardError, match="'bad'"):
        assert asyncio.run(reward.score(PROMPT, IMAGES, executor)).total == (0.25,) * 4


def test_single_terms_of_a_worker_can_be_asked() -> None:
    worker = RewardWorker(terms(pixel="first_pixel", level="constant"), index=0, name="reward-0")
    scores = worker.score_terms(("level",), PROMPT, IMAGES[:1], IMAGES[1:])
    worker.close()
    assert (scores.by_term, scores.total) == ({"level": (0.25,) * 4}, (0.25,) * 4)


def test_parts_of_a_sum_add_up_to_what_one_call_says() -> None:
    config = terms(pixel=own("first_pixel", 0.1), level=own("constant", 0.7), mean=own("slow_mean", 1.3))
    worker = RewardWorker(config, index=0, name="reward-0")
    whole = worker.score(PROMPT, IMAGES)
    lost = Scores((), {}, failed={"pixel": Failure("gone")}, retries={"pixel": 1})
    parts = [lost, *(worker.score_terms((name,), PROMPT, IMAGES) for name in ("mean", "pixel", "level"))]
    worker.close()
    found = combined(config.terms, parts)
    assert (found.total, list(found.by_term), found.failed) == (whole.total, list(whole.by_term), {})
    assert found.retries == {"pixel": 1}


def test_flags_of_the_sum() -> None:
    plain, judged = terms(a="constant"), terms(a="constant", b="Judge")
    assert (is_deterministic(plain), build_reward(plain).needs_target) == (True, False)
    assert (is_deterministic(judged), build_reward(judged).needs_target) == (False, True)
    assert check_rewards(judged)
    assert check_rewards(RewardConfig(terms={"ocr": RewardTerm()}))
    assert not check_rewards(terms(a="constant"))


def test_a_function_with_options_may_say_that_it_is_not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    import own_rewards

    monkeypatch.setattr(own_rewards.constant, "deterministic", False, raising=False)
    assert not is_deterministic(terms(a=own("constant", value=0.5)))


NEEDED = {
    "http": {"url": "http://127.0.0.1:8000"},
    "vlm_judge": {"base_url": "http://127.0.0.1:8000/v1", "model": "m"},
}
"""Options of the rewards that do not build without any."""


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_built_in_rewards_build(name: str) -> None:
    term = RewardTerm(options=dict(NEEDED.get(name, {})))
    assert build_reward(RewardConfig(terms={name: term})).weights == {name: 1.0}


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (RewardTerm(name="ocrr"), "ocrr'; did you mean 'ocr'"),
        (RewardTerm(name="no_such_module:f"), "no_such_module:f cannot be imported: ModuleNotFoundError"),
        (own("constnt"), "'constnt'; did you mean 'constant'"),
        (own("not_callable"), "must be a function or a class, got int"),
        (own("takes_only_images"), r"cannot be called with \(images, prompt\)"),
        (own("NeedsMore"), r"cannot be built with the options given \(none\): missing a required argument: 'side'"),
        (own("NotCallable"), "must have a method __call__"),
        (own("BreaksWhenBuilt"), "cannot be built: KeyError: 'weights'"),
        (own("constant", valuex=1.0), "'valuex'; did you mean 'value'"),
        (own("first_pixel", side=1), "it takes none, got 'side'"),
        (own("Judge", bonsu=1), "'bonsu'; did you mean 'bonus'"),
        (RewardTerm(name="color", options={"channel": "rde"}), "got 'rde'; did you mean 'red'"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_sentence(term: RewardTerm, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build_reward(RewardConfig(terms={"mine": term}))
    assert "reward.terms.mine" in str(error.value)
    assert "\n" not in str(error.value)


def test_no_terms_are_refused() -> None:
    with pytest.raises(
        ValueError, match="at least one reward, for example reward=ocr; built in are aesthetic, clip_score, color, "
    ):
        check_rewards(RewardConfig())


def test_checking_builds_nothing_that_has_no_check() -> None:
    import own_rewards

    config = terms(big="Expensive", color=RewardTerm())
    check_rewards(config)
    check_prompts(config, [PROMPT])
    assert own_rewards.Expensive.built == 0
    build_reward(config)
    assert own_rewards.Expensive.built == 1


def test_prompts_that_a_term_cannot_score_are_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="reward 'color': the first word of prompt 'a house'"):
        check_prompts(RewardConfig(terms={"color": RewardTerm()}), [PROMPT, Prompt(1, "a house")])


class Halves:
    """Scores nothing, names the largest value, and knows an image by the means of its upper and its lower half."""

    def __call__(self, images: Any, prompt: Prompt) -> list[dict[str, Any]]:
        return [{"score": 0.0, "largest": int(image.max()), "said": f"of {prompt.text}"} for image in images]

    def features(self, images: Any) -> Any:
        half = images.shape[1] // 2
        return np.stack([images[:, :half].mean((1, 2, 3)), images[:, half:].mean((1, 2, 3))], axis=1)


def broken(images: Any, prompt: Prompt) -> list[float]:
    raise ConnectionError("nobody is there")


def test_held_out_terms_stand_for_themselves_and_measure_distances_in_their_features() -> None:
    here = f"{__name__}"
    held_out = {"halves": RewardTerm(name=f"{here}:Halves"), "broken": RewardTerm(name=f"{here}:broken")}
    worker = RewardWorker(RewardConfig(terms={"color": RewardTerm()}), index=0, name="reward-0", held_out=held_out)
    images = np.zeros((3, 4, 4, 3), np.uint8)
    images[0, :2] = images[1, :2] = images[2, 2:] = 200
    try:
        found = worker.score_held_out(("halves", "broken"), Prompt(0, "red"), images[:1], images[1:])
        again = worker.score_held_out(("broken",), Prompt(0, "red"), images)
    finally:
        worker.close()
    assert found.by_term == {"halves": (0.0, 0.0, 0.0)} and "nobody is there" in found.failed["broken"]
    assert found.distances == {"halves": pytest.approx(2 / 3)}, "two of three pairs have nothing in common"
    assert found.extras == {"halves": {"largest": (200.0,) * 3, "said": ("of red",) * 3}}
    assert again.by_term == again.extras == {} and set(again.failed) == {"broken"}


class Faceless(Halves):
    """Has no features of its images."""

    def features(self, images: Any) -> Any:
        raise RuntimeError("no encoder")


class Nowhere(Halves):
    """Has features that are no numbers."""

    def features(self, images: Any) -> Any:
        return np.full((len(images), 2), np.nan)


def test_features_that_cannot_be_had_cost_their_own_term_and_black_images_have_a_distance() -> None:
    held_out = {each.__name__: RewardTerm(name=f"{__name__}:{each.__name__}") for each in (Halves, Faceless, Nowhere)}
    worker = RewardWorker(RewardConfig(terms={"color": RewardTerm()}), index=0, name="reward-0", held_out=held_out)
    try:
        found = worker.score_held_out(tuple(held_out), Prompt(0, "red"), np.zeros((2, 4, 4, 3), np.uint8))
    finally:
        worker.close()
    assert set(found.by_term) == set(found.extras) == {"Halves"} and found.distances == {"Halves": 1.0}
    assert "no encoder" in found.failed["Faceless"] and "finite" in found.failed["Nowhere"]
