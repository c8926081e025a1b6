"""Tests of the names in the documentation: commands, verbs, settings, files, tests, and the loop that a page quotes."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from async_flowrl.__main__ import VERBS
from async_flowrl.config.check import removed
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.observability.ledger import STATES
from tests.support.documents import writer

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
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


@pytest.mark.parametrize("page", sorted(set(RUNS.values())))
def test_commands_of_a_run_compose(page: str) -> None:
    for words in (arguments.split() for arguments, first in RUNS.items() if first == page):
        name = words[words.index("--config-name") + 1] if "--config-name" in words else "one_step_off"
        overrides = [word for word in words if not word.startswith("--") and word != name]
        compose_config(name, overrides)


def test_links_exist() -> None:
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_files_exist() -> None:
    folders = "async_flowrl|separation|checkpoint_engine|configs|examples|docs|tests"
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


def test_the_page_on_the_loop_quotes_it() -> None:
    loop = (ROOT / "async_flowrl" / "loop.py").read_text(encoding="utf-8")
    assert f"```python\n{loop}```" in TEXTS["docs/learn/loop.md"]


def test_the_readme_fits_two_screens_and_says_its_words_before_it_uses_them() -> None:
    readme = TEXTS["README.md"]
    assert len(readme.splitlines()) <= 102
    for word in ("version", "ticket", "staleness"):
        where = readme.lower().index(f"**{word}**")
        assert word not in re.sub(r"max_staleness|`[^`]*`|^.*\| .*$", "", readme[:where], flags=re.MULTILINE).lower(), (
            word
        )


def test_verbs_exist() -> None:
    for page, text in TEXTS.items():
        for verb in re.findall(r"(?:`|\$ |^ *)async-flowrl ([a-z][a-z-]+)", text, flags=re.MULTILINE):
            assert verb in VERBS, f"{page}: async-flowrl {verb}"


def test_the_page_of_settings_is_up_to_date() -> None:
    page = writer("write_configuration").page()
    assert page == TEXTS["docs/configuration.md"], "run: python docs/write_configuration.py"


def test_every_setting_is_on_its_page() -> None:
    for key in KEYS - SECTIONS:
        assert f"| `{key}` |" in TEXTS["docs/configuration.md"], key


def test_the_check_of_settings_can_fail() -> None:
    assert not known("rollout.num_worker")
    assert not known("trainer.learning_rates")
    assert known("reward.terms.mine.weight")


def test_the_states_of_a_worker_are_those_on_the_page() -> None:
    for state in STATES:
        assert f"`{state}`" in TEXTS["docs/metrics.md"]


def test_the_page_of_the_tests_helpers_has_each_of_them() -> None:
    folder = ROOT / "tests/support"
    page = (folder / "README.md").read_text()
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    tests = folder.parent
    elsewhere = {path.relative_to(tests).as_posix() for path in tests.rglob("*.py") if is_helper(path)}
    assert len(elsewhere) > 40
    assert files | elsewhere == set(re.findall(r"^\| `([^`]+\.py)` \|", page, re.MULTILINE))


def is_helper(path: Path) -> bool:
    """Whether it lies beside the tests that use it, in a folder that has no page and no commands of its own."""
    own = ("support", "performance", "pretend_gpu", "vllm_omni/support")
    if any(path.is_relative_to(ROOT / "tests" / folder) for folder in own):
        return False
    return not path.name.startswith("test_") and path.name not in ("__init__.py", "conftest.py")


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_a_page_that_newcomers_read_first_defines_its_words_before_it_uses_them(page: str) -> None:
    glossary = set(re.findall(r"^\| \*\*([\w ]+)\*\*", TEXTS["docs/glossary.md"], flags=re.MULTILINE))
    text = re.sub(r"`[^`\n]+`", "", TEXTS[page])
    for word in ("pool", "step", "version", "ticket", "staleness", "digest"):
        first = re.search(rf"(\**)\b{word}s?\b", text, flags=re.IGNORECASE)
        assert word in glossary and first is not None and first[1] == "**", f"{page} uses {word!r} before it says it"
    first_word = text.index("**pool**")
    assert "glossary.md" in text[text.rindex("\n\n", 0, first_word) : first_word], "linked where the first word stands"
