"""ToyReward, the reward worker's model of toy runs (toy.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from async_flowrl.config.scoring_pools import scoring_pools
from async_flowrl.rewards.call import group_result
from async_flowrl.types import Failure, Prompt, Scores


def toy_scores(name: str, prompt: Prompt, result: list[float], count: int) -> tuple[float, ...]:
    """Returns the result as scores, or raises RewardError as a real reward worker does."""
    return group_result(f"reward {name!r} on prompt {prompt.text!r}", result, count).scores


class ToyReward:
    def __init__(self, config: Any, index: int, name: str) -> None:
        self.name, pool = name, name.rpartition("-")[0] or name
        (own,) = (own for own in scoring_pools(config) if own.name == pool)
        self.terms = own.config(config.reward).terms
        self.spoil: str | None = None
        """Fault of the next result: "nan" (a NaN in it), "count" (a score too few), or None."""
        self.later = {("later", index) for index in range(10)}

    def score(self, terms: Sequence[str], prompt: Prompt, *images: Any) -> Scores:
        if self.terms.keys() & set(terms):
            return self.score_trained(terms, prompt, *images)
        return self.score_held_out(terms, prompt, *images)

    def score_trained(self, terms: Sequence[str], prompt: Prompt, *images: Any) -> Scores:
        values = [float(x.mean()) for image in images for x in image]
        result = {"nan": [*values[:-1], float("nan")], "count": values[:-1]}.get(self.spoil or "", values)
        self.spoil = None
        by_term = {name: toy_scores(name, prompt, result, len(values)) for name in terms}
        total = tuple(sum(self.terms[name].weight * by_term[name][i] for name in by_term) for i in range(len(values)))
        return Scores(total, by_term)

    def score_held_out(self, names: Sequence[str], prompt: Prompt, *images: Any) -> Scores:
        """Scores held-out terms; those named `never` always fail, those named `later` fail once per prompt."""
        values = tuple(float(x.mean()) for image in images for x in image)
        failed = {
            name: Failure(f"{name} failed") for name in names if name == "never" or (name, prompt.index) in self.later
        }
        self.later -= {(name, prompt.index) for name in names}
        answered = [name for name in names if name not in failed]
        said = {"mean_grey": values, "said": tuple(f"image {index}" for index in range(len(values)))}
        return Scores((), dict.fromkeys(answered, values), failed=failed, extras=dict.fromkeys(answered, said))


def score_alike(patch: pytest.MonkeyPatch, dull: Callable[[Prompt], bool]) -> None:
    """Gives all images of a group the same scores, where `dull` holds for its prompt."""
    score = ToyReward.score

    def scored(self: ToyReward, terms: Sequence[str], prompt: Prompt, *images: Any) -> Scores:
        found = score(self, terms, prompt, *images)
        alike = (0.5,) * len(found.total)
        return Scores(alike, dict.fromkeys(found.by_term, alike)) if dull(prompt) else found

    patch.setattr(ToyReward, "score", scored)
