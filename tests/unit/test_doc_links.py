"""Tests of the documentation's headings and links, of pages that code names, and of a page for every example."""

import re
import tomllib
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
CODE = ("async_flowrl", "separation", "checkpoint_engine", "configs", "examples", "tests", "docs")
FOLDERS = sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name[0] not in "_.")
HIDDEN = ("weights", "results", "hacking_results", "__pycache__")
"""Folders of data below an example."""


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^ *(```|~~~).*?^ *\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def headings(page: Path) -> list[tuple[int, str]]:
    """(level, text) in order."""
    return [(len(hashes), text) for hashes, text in re.findall(r"^(#{1,6}) (.+)$", prose(page), flags=re.MULTILINE)]


def anchors(page: Path) -> set[str]:
    """What GitHub and the site call the headings; where several have one text, they are numbered."""
    found: Counter[str] = Counter()
    names = set()
    for _, text in headings(page):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain.lower()).strip())
        names |= {name} if not found[name] else {f"{name}_{found[name]}", f"{name}-{found[name]}"}
        found[name] += 1
    return names


def test_a_page_has_one_title_and_skips_no_level() -> None:
    for page in PAGES:
        found = headings(page)
        levels = [level for level, _ in found]
        assert levels[:1] == [1] and levels.count(1) == 1, f"{page}: one heading of the first level, at the top"
        for (before, _), (after, text) in pairwise(found):
            assert after <= before + 1, f"{page}: {text!r} is {after} deep, below a heading {before} deep"


def test_links_lead_to_headings() -> None:
    known = cache(anchors)
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", prose(page)):
            there = page.parent / target if target else page
            assert anchor in known(there.resolve()), f"{page} links to {target}#{anchor}"


def test_code_names_pages_that_exist() -> None:
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".sh")]
    for path in [*files, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]:
        for name, anchor in re.findall(
            r"\b((?:docs|examples)/[\w/]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8")
        ):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"
            assert not anchor or anchor in anchors(ROOT / name), f"{path.relative_to(ROOT)} names {name}#{anchor}"


def test_every_page_of_the_site_is_in_its_menu_once() -> None:
    menu = re.findall(r"^ +- (?:[^:\n]+: )?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(menu) == [name.removeprefix("docs/") for name in NAMES if name.startswith("docs/")]


@pytest.mark.parametrize("index", ["examples/README.md", "docs/do/examples.md"])
def test_every_example_is_listed(index: str) -> None:
    listed = re.findall(r"^\|.*?(?:`examples/|\]\()(\w+)/", (ROOT / index).read_text(), flags=re.MULTILINE)
    assert sorted(listed) == FOLDERS


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name != "glyphs"])
def test_every_file_of_an_example_is_named_by_a_page(folder: str) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    files = [path for path in (ROOT / "examples" / folder).rglob("*") if path.is_file()]
    for path in files:
        if path.name not in ("README.md", "__init__.py") and not set(HIDDEN) & set(path.parts):
            assert path.name in pages, f"no page names {path.relative_to(ROOT)}"


def test_the_checks_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n```bash\n# a comment\n```\n\n### Three, `code`\n\n## [Two](x.md)\n\n## Two\n")
    assert headings(page) == [(1, "One"), (3, "Three, `code`"), (2, "[Two](x.md)"), (2, "Two")]
    assert anchors(page) == {"one", "three-code", "two", "two_1", "two-1"}


def test_the_site_is_built_strictly() -> None:
    """With `--quiet` mkdocs does not count its warnings, and builds whatever links are broken."""
    (build,) = re.findall(r"mkdocs build (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert build == "--strict"


def test_the_changelog_keeps_its_form_and_every_place_has_the_same_version() -> None:
    """https://keepachangelog.com: newest first, releases with a date, changes in groups."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    titles = [text for level, text in headings(ROOT / "CHANGELOG.md") if level == 2]
    assert titles[0] == "[Unreleased]"
    releases = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d", title) for title in titles[1:]]
    assert all(releases), titles
    numbers = [tuple(map(int, release.groups())) for release in releases if release]
    assert numbers == sorted(numbers, reverse=True)
    groups = {text for level, text in headings(ROOT / "CHANGELOG.md") if level == 3}
    assert groups <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
