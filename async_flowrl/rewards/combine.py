"""Combination of the partial scores of one group, which come from several calls of reward workers."""

from collections import Counter
from collections.abc import Mapping, Sequence

from async_flowrl.config.schema import RewardTerm
from async_flowrl.rewards.composite import weighted_total
from async_flowrl.types import Scores


def combined(terms: Mapping[str, RewardTerm], parts: Sequence[Scores]) -> Scores:
    """Returns one group's Scores from `parts`, each of which holds the scores of some of the `terms`.

    Terms are ordered as in the configuration, so scores and totals are bit-identical to those of a single call. A term
    that failed in one part and was scored in another keeps its score. A term that failed in several parts keeps the
    last failure. Retries are added up.
    """
    if len(parts) == 1:
        return parts[0]
    by_name = {name: values for part in parts for name, values in part.by_term.items()}
    by_term = {name: by_name[name] for name in terms if name in by_name}
    failed = {name: failure for part in parts for name, failure in part.failed.items() if name not in by_name}
    retries: Counter[str] = sum((Counter(part.retries) for part in parts), Counter())
    images = len(next(iter(by_term.values()), ()))
    return Scores(
        total=weighted_total({name: term.weight for name, term in terms.items()}, by_term, images),
        by_term=by_term,
        spans=tuple(span for part in parts for span in part.spans),
        extras={name: part.extras[name] for name in terms for part in parts if name in part.extras},
        failed={name: failed[name] for name in terms if name in failed},
        retries={name: retries[name] for name in terms if retries[name]},
    )
