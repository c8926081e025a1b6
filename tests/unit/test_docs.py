"""Tests of the documentation: its links, and the commands, settings, files and tests that it names, exist."""

import importlib.util
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from async_flowrl.__main__ import VERBS
from async_flowrl.config.check import removed
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from tests.support.documents import script

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / name for name in ("docs", "examples", "benchmarks")]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))])
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
FREE = {"algorithm.options", "reward.terms"}
"""Dictionaries whose keys are the user's own."""


def schema(kind: type[Any], prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(kind)
    for each in fields(kind):
        name, hint = f"{prefix}{each.name}", hints[each.name]
        yield name
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from schema(hint, name + ".")


KEYS = set(schema(Config))
SECTIONS = {key for key in KEYS if any(other.startswith(key + ".") for other in KEYS)}


def known(key: str) -> bool:
    """Whether it is a setting, a section with braces or a star, or below a dictionary of the user's."""
    return key in KEYS or any(key == free or key.startswith(free + ".") for free in FREE)


def code(text: str) -> Iterator[str]:
    """Inline code and the lines of code blocks, Python left out: `ctx.trainer.update` is no setting."""
    text = re.sub(r"^```python\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", outside)
    yield from (line.strip() for line in outside.splitlines() if line.startswith("    "))


def on_pages(pattern: str) -> dict[Any, set[str]]:
    """What the pattern finds, each with the pages that it is on."""
    found: dict[Any, set[str]] = {}
    for page, text in TEXTS.items():
        for each in re.findall(pattern, text):
            found.setdefault(each, set()).add(page)
    return found


def test_commands_are_modules_with_an_entry() -> None:
    for module, pages in on_pages(r"python -m ((?:async_flowrl|benchmarks|examples)[\w.]*)").items():
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{module}.__main__")
        if pages == {"CHANGELOG.md"}:
            continue  # of an earlier version
        assert spec is not None and spec.origin is not None, f"{module} on {pages}"
        assert '__name__ == "__main__"' in Path(spec.origin).read_text(encoding="utf-8"), f"{module} on {pages}"


def test_settings_exist() -> None:
    sections = "|".join(sorted(name for name in SECTIONS if "." not in name))
    setting = re.compile(rf"(?<![\w./])((?:{sections})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w(/.]|\.py)")
    for page in TEXTS:
        for text in code(our_words(page)):
            for key in setting.findall(text):
                if f"{key}(" not in text and not is_a_file_or_module(key):
                    gone = page == "CHANGELOG.md" and removed(key) is not None
                    assert known(key) or gone, f"{page}: {key} in {text!r}"


def our_words(page: str) -> str:
    """A page without the other project's words: the first column of the tables in docs/come_from."""
    text = TEXTS[page]
    return re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE) if page.startswith("docs/come_from/") else text


def is_a_file_or_module(name: str) -> bool:
    if name in KEYS:
        return False
    files = ("py", "md", "yaml", "json", "jsonl", "publish")
    return name.rsplit(".", 1)[-1] in files or name.startswith("benchmarks.")


def runs() -> dict[str, str]:
    """The arguments of each command that starts a run → the page that names it first."""
    found: dict[str, str] = {}
    for page in TEXTS:
        for text in code(TEXTS[page]):
            command = re.search(r"(?:python -m async_flowrl\.main|async-flowrl train) (.*)", text.split("  #", 1)[0])
            if command and not re.search(r"…|\[|\$|--multirun", command[1]):
                found.setdefault(" ".join(re.sub(r"[\"']", "", command[1]).rstrip("\\").split()), page)
    return found


RUNS = runs()


@pytest.mark.extended
@pytest.mark.parametrize("page", sorted(set(RUNS.values())))
def test_commands_of_a_run_compose(page: str) -> None:
    for words in (arguments.split() for arguments, first in RUNS.items() if first == page):
        name = words[words.index("--config-name") + 1] if "--config-name" in words else "one_step_off"
        overrides = [word for word in words if not word.startswith("--") and word != name]
        compose_config(name, overrides)


def prose(text: str) -> str:
    """The text without its code blocks."""
    return re.sub(r"^ *(```|~~~).*?^ *\1", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """What GitHub and the site call the headings; where several have one text, they are numbered."""
    counts: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#{1,6} (.+)$", prose(text), flags=re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain.lower()).strip())
        names |= {name} if not counts[name] else {f"{name}_{counts[name]}", f"{name}-{counts[name]}"}
        counts[name] += 1
    return names


def test_links_lead_to_pages_and_headings() -> None:
    for page, text in TEXTS.items():
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", prose(text)):
            linked = ((ROOT / page).parent / target) if target else ROOT / page
            assert linked.exists(), f"{page} links to {target}"
            assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), f"{page}: {target}#{anchor}"


def test_code_names_pages_that_exist() -> None:
    folders = ("async_flowrl", "separation", "checkpoint_engine", "configs", "examples", "tests", "docs", "benchmarks")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".sh")
    ]
    for path in [*files, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]:
        for name, anchor in re.findall(
            r"\b((?:docs|examples|benchmarks)/[\w/]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8")
        ):
            assert name in TEXTS, f"{path.relative_to(ROOT)} names {name}"
            assert not anchor or anchor in anchors(TEXTS[name]), f"{path.relative_to(ROOT)} names {name}#{anchor}"


def test_every_page_of_the_site_is_in_its_menu_once() -> None:
    menu = re.findall(r"^ +- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(f"docs/{name}" for name in menu) == sorted(page for page in TEXTS if page.startswith("docs/"))


def test_files_exist() -> None:
    folders = "async_flowrl|separation|checkpoint_engine|configs|examples|docs|tests|benchmarks"
    for path, pages in on_pages(rf"`((?:{folders})/[\w./*-]+)").items():
        assert list(ROOT.glob(path.rstrip("/"))), f"{pages} name {path}"


def test_tests_exist() -> None:
    for (path, test), pages in on_pages(r"`(tests/[\w/]+\.py)::(\w+)").items():
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(?:async )?def {test}\(", text, flags=re.MULTILINE), f"{test} on {pages}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for page, text in TEXTS.items():
        for target in re.findall(r"(?:`|\$ )make ([\w-]+)", text):
            assert target in targets, f"{page}: make {target}"


def test_verbs_exist() -> None:
    for page, text in TEXTS.items():
        for verb in re.findall(r"(?:`|\$ |^ *)async-flowrl ([a-z][a-z-]+)", text, flags=re.MULTILINE):
            assert verb in VERBS, f"{page}: async-flowrl {verb}"


def test_the_page_of_settings_is_up_to_date() -> None:
    page = script("docs/write_configuration.py").page()
    assert page == TEXTS["docs/configuration.md"], "run: python docs/write_configuration.py"


def test_the_loop_that_a_page_quotes_is_the_loop() -> None:
    (loop,) = (ROOT / "async_flowrl").rglob("loop.py")
    (quoted,) = re.findall(r"```python\n(.*?)```", TEXTS["docs/learn/loop.md"], flags=re.DOTALL)
    assert quoted in loop.read_text(encoding="utf-8")


def test_every_place_has_the_same_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
