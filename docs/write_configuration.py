"""python docs/write_configuration.py: docs/configuration.md from the fields of the configuration."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

from async_flowrl.algorithms.registry import USED_BY
from async_flowrl.config.schema import Config
from async_flowrl.config.settings import WEIGHTS, rule_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
GROUPS = ("model", "algorithm", "reward", "data", "trainer", "experiment")
HEAD = """# Which settings are there?

    python -m async_flowrl.main --config-name one_step_off total_steps=300 trainer.learning_rate=1e-4

- `--config-name` picks a mode file of `configs/`: {modes}. Default `one_step_off`.
- `key=value` sets a key of the tables below; `group=option` picks a file of `configs/<group>/`. Keys win over groups.
- Text is taken as typed, but `null`, a whole text in quotes, `${{…}}`, and commas with `--multirun`.
- `--cfg job` prints the composed configuration and stops. `--config-dir DIR` adds a folder of your own groups.
- `--multirun` gives every job a folder of its own below `hydra.sweep.dir`, instead of `output_dir`; a job that
  fails does not end the sweep, but its exit code is the sweep's.
- `null` is None; lists are written `[0,5]`. Paths in files expand `~`; on the command line your shell does.
- A key that does not exist is refused with the nearest one that does, also with `+` in front. So is a value of the
  wrong type or range, and a combination that cannot run: one sentence, exit code 2, before any process starts.

| group | options |
|---|---|
{groups}

An experiment is a set of values for everything a recipe needs, applied after the groups: it wins over them, and keys
given on the command line win over it. The modes start with `experiment=two_prompts`, except with a real model;
`~experiment` leaves it out, so that only groups and keys count. Defaults that depend on the model are null in the
tables: `configs/family/` has them, and a run's `config.yaml` the values that they became.

In the tables, *default* is the schema's, *values* are those that are accepted (what other fields ask comes on top), and
*changes* says what another value does to a run:

- `weights`: the run gets other weights, so a checkpoint is only resumed with the same value.
- `rounding`: the same mathematics in other shapes or another order, so the last bits differ; a resume warns.
- `nothing`: not a bit of the weights depends on it, and a resume may change it.

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


def tables(section: Any, prefix: str, changes: str) -> Iterator[str]:
    """A table of the section's own fields, then those of the sections inside it; `changes` is the section's mark."""
    about, meanings = texts(section)
    members = fields(section)
    rows = [
        row(prefix, member, changes_of(member, changes), meanings.get(member.name, ""))
        for member in members
        if not is_dataclass(member.type)
    ]
    if rows:
        title = f"## {prefix[:-1] or 'Top level'}\n\n" + (f"{about}\n\n" if about else "")
        columns = "| key | type | default | values | changes | meaning |\n|---|---|---|---|---|---|\n"
        yield title + columns + "\n".join(rows) + "\n"
    for member in members:
        mark = changes_of(member, changes)
        if is_dataclass(member.type):
            yield from tables(member.type, f"{prefix}{member.name}.", mark)
        named = ".<name>." if get_origin(member.type) is dict else "."
        for entry in filter(is_dataclass, get_args(member.type)):
            yield from tables(entry, f"{prefix}{member.name}{named}", mark)


def texts(section: Any) -> tuple[str, dict[str, str]]:
    """The docstring of a dataclass, and field → the string under it. They are in its source alone."""
    tree = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(tree, ast.ClassDef)
    return one_line(ast.get_docstring(tree) or ""), {
        node.target.id: one_line(str(text.value.value))
        for node, text in pairwise(tree.body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def row(prefix: str, member: Field[Any], changes: str, meaning: str) -> str:
    kind = member.type.__name__ if isinstance(member.type, type) else re.sub(r"\w+\.", "", str(member.type))
    default = member.default_factory() if callable(member.default_factory) else member.default
    if prefix == "algorithm." and (used_by := USED_BY.get(member.name)):
        meaning += f" Used by {', '.join(used_by)}."
    cells = (f"`{prefix}{member.name}`", cell(kind), cell(written(default)), accepted(member), changes, meaning)
    return f"| {' | '.join(cells)} |"


def accepted(member: Field[Any]) -> str:
    """The choices or bounds of a field; empty where its type says all."""
    rule = rule_of(member)
    bounds = f"{rule.bounds} (inf = no limit)" if rule.infinite else rule.bounds
    return ", ".join(f"`{choice}`" for choice in rule.choices) or bounds


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
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
