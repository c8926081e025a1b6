"""The reward of a run: a weighted sum of terms, which are scored concurrently."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, cast

from async_flowrl.config.schema import RewardConfig
from async_flowrl.rewards.base import PromptRefused, RewardError
from async_flowrl.rewards.call import Sources, Term, check_size, read_sources, score_term
from async_flowrl.rewards.served import Addresses
from async_flowrl.types import ByteArray, Prompt, Requests, Scores, Span


@dataclass(frozen=True)
class CompositeReward:
    """The weighted sum of `terms`; `config` limits the retries and the concurrency of pointwise terms."""

    terms: tuple[Term, ...]
    config: RewardConfig

    @property
    def needs_target(self) -> bool:
        return any(getattr(term.reward, "needs_target", False) for term in self.terms)

    @property
    def weights(self) -> Mapping[str, float]:
        return {term.name: 0.0 if term.held_out else term.weight for term in self.terms}

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raises ValueError, which names the term, for the first prompt that a term cannot score."""
        checks = [(term.name, check) for term in self.terms if (check := getattr(term.reward, "check", None))]
        comparing = [term.name for term in self.terms if term.sources]
        for prompt in prompts:
            if comparing and not prompt.images:
                edits = f"prompt {prompt.text!r:.80} has no image that it edits (column image, with data.images=true)"
                raise ValueError(f"reward {comparing[0]!r} compares a result with its source, and {edits}")
            for name, check in checks:
                try:
                    check(prompt)
                except ValueError as error:
                    raise ValueError(f"reward {name!r}: {error}") from error

    async def score(
        self, prompt: Prompt, images: ByteArray, executor: Executor, sources: Sources | None = None
    ) -> Scores:
        """Returns the scores of images uint8 [n, H, W, 3]. Raises RewardError if a required term failed, or all did."""
        return self.demanded(await self.attempt(prompt, images, executor, sources=sources))

    def demanded(self, scores: Scores) -> Scores:
        """Returns the scores. Raises RewardError if a required term failed, or if all terms failed."""
        fatal = [name for term in self.terms if (name := term.name) in scores.failed and term.required]
        for name in fatal or (() if scores.by_term else scores.failed):
            failure = scores.failed[name]
            raise (PromptRefused if failure.refused else RewardError)(failure.reason)
        return scores

    async def attempt(
        self,
        prompt: Prompt,
        images: ByteArray,
        executor: Executor,
        *,
        only: Collection[str] | None = None,
        sources: Sources | None = None,
    ) -> Scores:
        """Returns the scores like `score`, but terms that fail are listed in `failed` and nothing is raised for them.

        `only` names the terms to score; None means all. Calls of rewards run in the threads of `executor`. `sources`
        are the images that the prompt edits; None: they are read from their files, once for all terms. Raises
        RewardError if a weighted sum is too large for the loss.
        """
        start = time.time()
        terms = [term for term in self.terms if only is None or term.name in only]
        edited: asyncio.Future[Sources] | None = None
        if any(term.sources for term in terms):
            loop = asyncio.get_running_loop()
            edited = loop.run_in_executor(executor, lambda: read_sources(prompt) if sources is None else sources)
        calls = (
            score_term(term, prompt, images, executor, self.config, edited if term.sources else None) for term in terms
        )
        scores = combined(self.weights, await asyncio.gather(*calls))
        return replace(scores, spans=(Span("score", start, time.time()), *scores.spans))

    def connect(self, servers: Mapping[str, Addresses]) -> None:
        for term in self.terms:
            if (address := servers.get(term.name)) is not None:
                cast("Any", term.reward).connect(address.urls, address.token)


def weighted_total(
    weights: Mapping[str, float], by_term: Mapping[str, tuple[float, ...]], images: int
) -> tuple[float, ...]:
    """Returns per image the weighted sum of the terms in `by_term`, added in the order of `weights`.

    The fixed order keeps the sum bit-identical. Raises RewardError if a sum is beyond `call.MAX_SCORE`.
    """
    names = [name for name in weights if name in by_term]
    total = tuple(sum(weights[name] * by_term[name][image] for name in names) for image in range(images))
    for number in total:
        check_size("the weighted sum of the rewards", number)
    return total


def combined(weights: Mapping[str, float], parts: Sequence[Scores]) -> Scores:
    """Returns one group's Scores from `parts`, each of which holds the scores of some of the terms of `weights`."""
    # Terms are in the order of `weights`, so scores and totals are bit-identical to those of a single call. A term that
    # was scored in one part keeps its score; one that failed in several keeps the last failure.
    by_name = {name: values for part in parts for name, values in part.by_term.items()}
    by_term = {name: by_name[name] for name in weights if name in by_name}
    failed = {name: failure for part in parts for name, failure in part.failed.items() if name not in by_name}
    retries: Counter[str] = sum((Counter(part.retries) for part in parts), Counter())
    requests: dict[str, Requests] = {}
    for name, sent in (item for part in parts for item in part.requests.items()):
        requests[name] = requests.get(name, Requests()) + sent
    images = len(next(iter(by_term.values()), ()))
    return Scores(
        total=weighted_total(weights, by_term, images),
        by_term=by_term,
        spans=tuple(span for part in parts for span in part.spans),
        extras={name: part.extras[name] for name in weights for part in parts if name in part.extras},
        failed={name: failed[name] for name in weights if name in failed},
        retries={name: retries[name] for name in weights if retries[name]},
        requests={name: requests[name] for name in weights if name in requests},
        distances={name: part.distances[name] for name in weights for part in parts if name in part.distances},
    )
