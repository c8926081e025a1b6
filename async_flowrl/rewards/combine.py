"""The scores of a group, put together from what several calls of reward workers say of it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from async_flowrl.config.schema import RewardTerm
from async_flowrl.rewards.composite import weighted_total
from async_flowrl.types import Scores


def combined(terms: Mapping[str, RewardTerm], parts: Sequence[Scores]) -> Scores:
    """One group's Scores from calls for some of the `terms` each: bit for bit what one call for all would say.

    Everything is in the order of the configuration, whichever part came first. A term that failed in one call and was
    scored in another has its score, and one that failed in several the last of its reasons; retries are added up.
    """
    if len(parts) == 1:
        return parts[0]
    found = {name: values for part in parts for name, values in part.by_term.items()}
    by_term = {name: found[name] for name in terms if name in found}
    failed = {name: failure for part in parts for name, failure in part.failed.items() if name not in found}
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
