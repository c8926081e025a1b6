"""Names of the parameters that `tune=full` trains: all but those that `full.freeze` names."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from async_flowrl.config.messages import did_you_mean


def trained_names(names: Mapping[str, object], freeze: Sequence[str]) -> list[str]:
    """Returns the sorted names that match no pattern of `freeze`.

    Patterns are as in a shell; * also matches dots. Raises ValueError, one sentence, for a pattern without matches, and
    if no name is left.
    """
    frozen: set[str] = set()
    for pattern in freeze:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            hint = did_you_mean(pattern, sorted(names), shown=str)
            raise ValueError(
                f"full.freeze: {pattern!r} matches no parameter of the model, e.g. {min(names)}{hint}; "
                "* stands for anything: 'pos_embed.*'"
            )
        frozen |= matched
    if not names.keys() - frozen:
        raise ValueError(f"full.freeze={list(freeze)} freezes all {len(names)} parameters: nothing is left to train")
    return sorted(names.keys() - frozen)
