"""The override `reward.terms={...}` on the command line replaces all reward terms of the configuration.

Hydra would merge both dictionaries, so the configuration's terms would silently be trained as well. To change single
terms: `+reward.terms.NAME={...}` adds one, `reward.terms.NAME.weight=2` changes one, `~reward.terms.NAME` removes one.
"""

import functools
from collections.abc import Callable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

TERMS = ("reward.terms", "evaluate.reward.terms")
Terms = Callable[[str, Sequence[str]], Sequence[str]]
"""A function (key, overrides) → names of the terms under the key in a configuration with these overrides."""


@functools.lru_cache(maxsize=1024)
def parse(override: str) -> Override:
    """Returns an override of a command line, parsed. Raises HydraException if it cannot be parsed."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed


def replacing_terms(overrides: Sequence[str], terms_of: Terms) -> list[str]:
    """Returns the overrides for Hydra; before an override that replaces all terms come deletions of the old ones.

    All overrides must be valid in Hydra's grammar.
    """
    written = list(overrides)
    for key in TERMS:
        written = _replacing(key, written, terms_of)
    return written


def _replacing(key: str, written: list[str], terms_of: Terms) -> list[str]:
    parsed = [parse(each) for each in written]
    own = [override for override in parsed if _under(key, override)]
    if not own:
        return written
    others = [text for text, override in zip(written, parsed, strict=True) if override not in own]
    whole = [override for override in own if override.key_or_group == key and _gives_terms(override)]
    if not whole:
        return [*others, *(_added(key, override) for override in own)]
    plain = [text for text, override in zip(written, parsed, strict=True)
             if not any(_under(each, override) for each in TERMS) and not override.is_sweep_override()]  # fmt: skip
    deleted = [f"~{key}.{name}" for name in terms_of(key, plain)]
    rest = [_added(key, each) for each in own if each not in whole and each.input_line not in deleted]
    return [*others, *deleted, _as_addition(whole[-1], key), *rest]


def _under(key: str, override: Override) -> bool:
    return override.key_or_group == key or override.key_or_group.startswith(f"{key}.")


def _gives_terms(override: Override) -> bool:
    return not override.is_delete() and (override.is_sweep_override() or isinstance(override.value(), dict))


def _added(key: str, override: Override) -> str:
    """Rewrites `+reward.terms.ocr={...}`, because Hydra can only merge a term into the dictionary of all terms."""
    line, name = str(override.input_line), override.key_or_group.removeprefix(f"{key}.")
    if not (override.is_add() or override.is_force_add()) or "." in name or name == key:
        return line
    if override.is_sweep_override() or not isinstance(override.value(), dict):
        return line
    return f"+{key}={{{name}: {line.partition('=')[2]}}}"


def _as_addition(override: Override, key: str) -> str:
    return f"+{key}={str(override.input_line).partition('=')[2]}"
