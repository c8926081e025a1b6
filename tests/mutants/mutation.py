"""Plants a fault in the package's own source, for as long as a test runs."""

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any


@dataclass(frozen=True)
class Patch:
    """In the source of `target` ("package.module:Class.method"), `old`, which is there exactly once, becomes `new`."""

    target: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A planted fault and the test that must fail because of it.

    `raises`: names of the exceptions by which it may fail. Anything else (a NameError, say) is a fault of the mutant.
    """

    name: str
    patches: tuple[Patch, ...]
    caught_by: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    raises: tuple[str, ...] = ("AssertionError",)


@contextmanager
def planted(patches: tuple[Patch, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(_planted(patch))
        yield


@contextmanager
def _planted(patch: Patch) -> Iterator[None]:
    module_name, _, path = patch.target.partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for part in outer:
        owner = getattr(owner, part)
    original = inspect.getattr_static(owner, name)
    setattr(owner, name, rewritten(original, patch))
    try:
        yield
    finally:
        setattr(owner, name, original)


def rewritten(original: Any, patch: Patch) -> Any:
    """The function with its source changed, in the same globals."""
    function = original.fget if isinstance(original, property) else original
    assert isinstance(function, FunctionType), f"{patch.target} is no plain function"
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    assert source.count(patch.old) == 1, f"{patch.target} has {source.count(patch.old)} times {patch.old!r}"
    code = compile(source.replace(patch.old, patch.new), f"<mutant of {patch.target}>", "exec")
    space: dict[str, Any] = {}
    exec(code, function.__globals__, space)
    return space[function.__name__]


def find_test(path: str) -> Any:
    """The test function "tests.unit.package.module:test_name"; modules beside it can be imported as in a pytest run."""
    module_name, _, name = path.partition(":")
    root = Path(__file__).parents[2]
    folder = str((root / module_name.replace(".", "/")).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return getattr(importlib.import_module(module_name), name)
