"""python docs/write_configuration.py: docs/configuration.md from the fields of async_flowrl/config/schema.py."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, PAGE = ROOT / "async_flowrl" / "config" / "schema.py", ROOT / "docs" / "configuration.md"
GROUPS = ("model", "algorithm", "reward", "data", "trainer", "experiment")
HEAD = """# Which settings are there?

    python -m async_flowrl.main --config-name one_step_off total_steps=300 trainer.learning_rate=1e-4

- `--config-name` picks a mode file of `configs/`: {modes}. Default `one_step_off`.
- `key=value` sets a key of the tables below; `group=option` picks a file of `configs/<group>/`. Keys win over groups.
- `--cfg job` prints the composed configuration and stops. `--config-dir DIR` adds a folder of your own groups.
- `null` is None; lists are written `[0,5]`. Paths in files expand `~`; on the command line your shell does.
- A key that does not exist is refused with the nearest one that does, also with `+` in front. So is a value of the
  wrong type or range, and a combination that cannot run: one sentence, exit code 2, before any process starts.

| group | options |
|---|---|
{groups}

An experiment is a set of values for everything a recipe needs, applied after the groups: it wins over them, and keys
given on the command line win over it. The modes start with `experiment=two_prompts`; `~experiment`
leaves it out, so that only groups and keys count. Defaults below are those of the schema.

This page is made from `async_flowrl/config/schema.py` by `python docs/write_configuration.py`.
"""


def page() -> str:
    """The whole page as Markdown."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    sections = list(tables(classes, "Config", ""))
    configs = ROOT / "configs"
    modes = ", ".join(f"`{path.stem}`" for path in sorted(configs.glob("*.yaml")) if path.stem != "base")
    groups = "\n".join(
        f"| `{group}` | {', '.join(f'`{path.stem}`' for path in sorted((configs / group).glob('*.yaml')))} |"
        for group in GROUPS
    )
    return HEAD.format(modes=modes, groups=groups) + "\n" + "\n".join(sections)


def tables(classes: dict[str, ast.ClassDef], name: str, prefix: str) -> Iterator[str]:
    """A table of the class's own fields, then those of the sections inside it."""
    fields = list(described(classes[name].body))
    inner = [(field, kind) for field, kind, _, _ in fields if kind in classes]
    own = [(f, kind, default, text) for f, kind, default, text in fields if kind not in classes]
    if own:
        about = ast.get_docstring(classes[name]) or ""
        rows = [
            f"| `{prefix}{f}` | {cell(kind)} | {cell(default)} | {one_line(text)} |" for f, kind, default, text in own
        ]
        title = f"## {prefix[:-1] or 'Top level'}\n\n" + (f"{one_line(about)}\n\n" if about and prefix else "")
        yield title + "| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    for field, kind in inner:
        yield from tables(classes, kind, f"{prefix}{field}.")
    for field, kind, _, _ in own:
        entry = kind.removeprefix("dict[str, ").removesuffix("]")
        if entry in classes:
            yield from tables(classes, entry, f"{prefix}{field}.<name>.")


def described(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of each field; the meaning is the string after it."""
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            default = ast.unparse(node.value) if node.value is not None else ""
            yield node.target.id, ast.unparse(node.annotation), written(default), str(text)


def written(default: str) -> str:
    """A default as it is typed on the command line."""
    for factory, text in (
        ("field(default_factory=dict)", "{}"),
        ("None", "null"),
        ("True", "true"),
        ("False", "false"),
    ):
        if default == factory:
            return text
    if default.startswith("("):
        return default.replace("(", "[").replace(")", "]").replace(" ", "")
    return default.strip("'") if default != "' '" else default


def cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
