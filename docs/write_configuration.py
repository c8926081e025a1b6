"""python docs/write_configuration.py: docs/configuration.md from the fields of the configuration."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

from async_flowrl.algorithms.registry import FINAL, NOISY, USED_BY
from async_flowrl.config.schema import Config
from async_flowrl.config.settings import MAX_SEED, NOTHING, WEIGHTS, rule_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
GROUPS = ("model", "algorithm", "reward", "data", "trainer", "experiment")
HEAD = """# Which settings are there?

Look up a setting here, and change it on the command line:

    async-flowrl train --config-name one_step_off total_steps=300 trainer.learning_rate=1e-4

- `--config-name` picks a mode file of `configs/`: {modes}. Default `one_step_off`.
- `key=value` sets a key of the tables below; `group=option` picks a file of `configs/<group>/`. Keys win over groups.
- An `experiment` sets everything that a recipe needs: it wins over groups, and keys win over it. The modes start with
  `experiment=two_prompts`, except with a real model; `~experiment` leaves it out.
- Text is taken as typed, but `null` (none), a whole text in quotes, `${{…}}`, and commas with `--multirun`. Lists are
  written `[0,5]`. Paths in files expand `~`.
- `--cfg job` prints the composed configuration and stops. `--config-dir DIR` adds a folder of your own groups.
- `--multirun` gives every job a folder below `hydra.sweep.dir`; a job that fails does not end the sweep, but decides
  its exit code.
- A key that does not exist is refused with the nearest one that does, and so is a wrong value or a combination that
  cannot run: one sentence, exit code 2, before any process starts.

| group | options |
|---|---|
{groups}

Behind the meaning stands in italics what is accepted (null too where it is the default; what other fields ask comes on
top), and what another value does to a resumed run: *weights*, it is refused, because other weights would come out;
*rounding*, the last bits may differ, and the run warns; neither, not a bit of the weights depends on it. Defaults that
depend on the model are null here and stand in `configs/family/`; a run's `config.yaml` has the values that they became.

This page is made from `async_flowrl/config/schema.py` by `python docs/write_configuration.py`.
"""


def page() -> str:
    """The whole page as Markdown."""
    configs = ROOT / "configs"
    modes = ", ".join(f"`{path.stem}`" for path in sorted(configs.glob("*.yaml")) if path.stem != "base")
    groups = "\n".join(
        f"| `{group}` | {', '.join(f'`{path.stem}`' for path in sorted((configs / group).glob('*.yaml')))} |"
        for group in GROUPS
    )
    return HEAD.format(modes=modes, groups=groups) + "\n" + "\n".join(tables(Config, "", WEIGHTS))


def tables(section: Any, prefix: str, changes: str, earlier: dict[Any, str] | None = None) -> Iterator[str]:
    """A table of the section's own fields, then those of the sections inside it; `changes` is the section's mark.

    `earlier` is section → prefix of the entries of dictionaries that have a table already, which get none again.
    """
    earlier = {} if earlier is None else earlier
    about, meanings = texts(section)
    members = fields(section)
    rows = [
        row(prefix, member, changes_of(member, changes), meanings.get(member.name, ""))
        for member in members
        if not is_dataclass(member.type)
    ]
    if rows:
        title = f"## `{prefix[:-1]}`\n\n" if prefix else "## Top level\n\n"
        columns = "| key = default | meaning, *values; what a change does; algorithms* |\n|---|---|\n"
        yield title + (f"{about}\n\n" if about else "") + columns + "\n".join(rows) + "\n"
    for member in members:
        mark = changes_of(member, changes)
        if is_dataclass(member.type):
            yield from tables(member.type, f"{prefix}{member.name}.", mark, earlier)
        named = ".<name>." if get_origin(member.type) is dict else "."
        for entry in filter(is_dataclass, get_args(member.type)):
            below = f"{prefix}{member.name}{named}"
            if entry in earlier:
                yield f"`{below[:-1]}` has the keys of `{earlier[entry]}`; none of them changes the weights.\n"
            else:
                earlier[entry] = below[:-1]
                yield from tables(entry, below, mark, earlier)


@cache
def classes(file: str) -> dict[str, ast.ClassDef]:
    body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def texts(section: Any) -> tuple[str, dict[str, str]]:
    """The docstring of a dataclass, and field → the string under it. They are in its source alone."""
    tree = classes(inspect.getfile(section))[section.__name__]
    return one_line(ast.get_docstring(tree) or ""), {
        node.target.id: one_line(str(text.value.value))
        for node, text in pairwise(tree.body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def row(prefix: str, member: Field[Any], changes: str, meaning: str) -> str:
    default = member.default_factory() if callable(member.default_factory) else member.default
    notes = [accepted(member), "" if changes == NOTHING else changes]
    if prefix == "algorithm." and (used_by := USED_BY.get(member.name)):
        notes.append(f"with {users(used_by)}")
    rule = "; ".join(filter(None, notes))
    meaning += f" *{rule}*" if rule else ""
    return f"| `{prefix}{member.name}` = {cell(written(default))} | {meaning} |"


def users(names: tuple[str, ...]) -> str:
    """The algorithms that use a field, by what they train on where all of those do."""
    for kind, what in ((NOISY, "noisy steps"), (FINAL, "final images")):
        if set(kind) <= set(names):
            return ", ".join([what, *(name for name in names if name not in kind)])
    return ", ".join(names)


def accepted(member: Field[Any]) -> str:
    """The choices of a field, or its type and bounds; empty for true and false."""
    rule = rule_of(member)
    kind = member.type.__name__ if isinstance(member.type, type) else re.sub(r"\w+\.", "", str(member.type))
    if kind == "bool":
        return ""
    kind, optional = kind.removesuffix(" | None"), kind.endswith(" | None")
    signs = {"at least ": "≥", "above ": ">", "at most ": "≤", "below ": "<", " and ": ", ", str(MAX_SEED): "2⁶³-1"}
    bounds = rule.bounds
    for words, sign in signs.items():
        bounds = bounds.replace(words, sign)
    values = ", ".join(rule.choices) or f"{one_line(kind)} {bounds}".strip()
    return values + (", inf" if rule.infinite else "") + (", null" if optional and member.default is not None else "")


def changes_of(member: Field[Any], section: str) -> str:
    """Returns what the field changes; a section's mark holds for all of its fields."""
    return rule_of(member).changes if section == WEIGHTS else section


def written(default: Any) -> str:
    """A default as it is typed on the command line."""
    if default is None or isinstance(default, bool):
        return "null" if default is None else str(default).lower()
    if isinstance(default, tuple):
        return f"[{','.join(map(str, default))}]"
    return repr(default) if default == " " else str(default)


def cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def one_line(text: str) -> str:
    """The text on one line; what Markdown would read as emphasis, HTML or a column is escaped, except in code."""
    parts = " ".join(text.split()).split("`")
    plain = [re.sub(r"([*<])", r"\\\1", part) if index % 2 == 0 else part for index, part in enumerate(parts)]
    return "`".join(plain).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
