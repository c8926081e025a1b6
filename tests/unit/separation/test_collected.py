"""Tests of imports during which garbage collection is paused."""

import gc
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from separation.host import Host
from separation.imports import without_collections

ROOT = Path(__file__).parents[3]


def test_garbage_waits_inside_and_is_collected_again_afterwards() -> None:
    assert gc.isenabled()
    with without_collections():
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_after_an_import_that_fails() -> None:
    with pytest.raises(ModuleNotFoundError), without_collections():
        import_module("no_such_module")
    assert gc.isenabled()


def test_the_last_thread_turns_it_on_again() -> None:
    first, second = without_collections(), without_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled(), "the second still imports"
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_worker_imports_its_factory_without_and_works_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import gc\nwhile_imported = gc.isenabled()\ndef make(**_):\n    return [while_imported, gc.isenabled()]\n"
    (tmp_path / "observing_factory.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    host = Host("one", threads=1)
    host.build("observing_factory:make", {})
    assert host.run("copy") == [False, True]
    del sys.modules["observing_factory"]


ALONE = """
import gc, sys
from separation.host import Host, ProcessHost, Surroundings
surroundings = Surroundings({}, owns_gpu=False)
Host("thread", threads=1).build("fractions:Fraction", {})
shared = gc.get_freeze_count()
ProcessHost("process", threads=1, surroundings=surroundings, log_file=None).build("decimal:Decimal", {})
print(shared, gc.get_freeze_count() > 1000, gc.isenabled())
"""


def test_what_a_worker_with_its_own_process_imports_is_not_searched_again() -> None:
    """A worker that is a thread leaves the objects of others in its process alone."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["0", "True", "True"]
