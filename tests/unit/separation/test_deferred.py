"""Tests of modules whose import is put off until they are used."""

import importlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from separation.deferred import defer

PACKAGE = """
loaded = True
VALUE = 7

def double(number, *, plus=0):
    return 2 * number + plus
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a package with a submodule `inside`; nothing of it is imported."""
    name = "deferred_for_a_test"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(PACKAGE)
    (tmp_path / name / "inside.py").write_text(f"from {name} import VALUE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield name
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def loaded(name: str) -> bool:
    return "loaded" in vars(sys.modules[name])


def test_two_imports_load_nothing_and_an_attribute_loads_the_module(package: str) -> None:
    defer(package)
    for _ in range(2):
        module = importlib.import_module(package)
        assert not loaded(package)
    assert module.VALUE == 7
    assert loaded(package), "the real module stands in sys.modules then"
    assert importlib.import_module(package).VALUE == 7


def test_threads_that_use_it_at_the_same_time_all_get_the_real_module(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one looks while the first has taken the substitute away and imports the module."""
    defer(package)
    substitute, importing, looked = sys.modules[package], threading.Event(), threading.Event()
    real = importlib.import_module

    def slow(name: str) -> ModuleType:
        importing.set()
        looked.wait(60)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", slow)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(lambda: substitute.VALUE)
        importing.wait(60)
        second = pool.submit(lambda: substitute.VALUE)
        looked.set()
        assert (first.result(60), second.result(60)) == (7, 7)
    assert loaded(package)


def test_a_function_that_is_imported_by_name_loads_the_module_when_it_is_called(package: str) -> None:
    defer(package, functions=("double",))
    scope: dict[str, object] = {}
    exec(f"from {package} import double", scope)
    double = scope["double"]
    assert not loaded(package) and callable(double)
    assert double(3, plus=1) == 7
    assert loaded(package)


def test_another_name_and_a_submodule_load_it_at_once(package: str) -> None:
    defer(package)
    inside = importlib.import_module(f"{package}.inside")
    assert loaded(package) and inside.VALUE == 7
    assert inside is sys.modules[package].inside


def test_a_module_that_cannot_be_imported_says_so_when_it_is_used(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "__init__.py").write_text("raise ImportError('its library is broken')")
    defer(package)
    module = importlib.import_module(package)
    with pytest.raises(ImportError, match="its library is broken"):
        _ = module.VALUE


def test_what_is_imported_or_not_installed_is_left_alone(package: str) -> None:
    real = importlib.import_module(package)
    defer(package)
    assert sys.modules[package] is real
    for name in ("no_such_package_at_all", "no_such_package_at_all.stats"):
        defer(name)
        assert name not in sys.modules


def test_a_submodule_that_the_package_imports_is_executed_once(package: str, tmp_path: Path) -> None:
    """Python asks for the package's folders, which imports it and with it the submodule that Python looks for."""
    (tmp_path / package / "inside.py").write_text("class Kind: pass\n")
    (tmp_path / package / "__init__.py").write_text("from .inside import Kind\n")
    defer(package)
    inside = importlib.import_module(f"{package}.inside")
    assert inside is sys.modules[f"{package}.inside"] is sys.modules[package].inside
    assert inside.Kind is sys.modules[package].Kind
    assert inside.__spec__ is not None and isinstance(inside.__spec__.loader, SourceFileLoader)
    assert importlib.reload(inside).Kind is not sys.modules[package].Kind, "a reload executes it again"
