"""Planted faults: while a test runs, a function, method or constant is replaced by a faulty one."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.toy import forget_calm_runs

Fault = Callable[[Any], Any]
"""Takes the original object and returns its replacement, usually a function that calls the original in a wrong way."""


@dataclass(frozen=True)
class Mutant:
    """A planted fault and the test that must fail because of it."""

    name: str
    faults: Mapping[str, Fault]
    """Target → fault. A target is "package.module:Class.method", or "package.module:name" of any other object."""
    caught_by: str
    """The test, as "package.module:test_name"."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the test function."""
    raises: tuple[str, ...] = ("AssertionError",)
    """Names of the exceptions by which the test may fail. Any other, e.g. TypeError, shows an error in the mutant."""


def nothing(original: Any) -> Callable[..., None]:
    """Fault: the function does nothing, so a check refuses nothing and a removal removes nothing."""
    return lambda *args, **options: None


def nothing_awaited(original: Any) -> Any:
    """Fault: the coroutine function does nothing."""
    return mock.AsyncMock(return_value=None)


def before(first: Callable[..., Any]) -> Fault:
    """Returns a fault that calls `first` with the function's own arguments before the function."""

    def fault(original: Any) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            first(*args, **options)
            return original(*args, **options)

        return wrapper

    return fault


def after(then: Callable[..., Any]) -> Fault:
    """Returns a fault that calls `then` with the function's own arguments after the function.

    After a coroutine function, `then` is awaited.
    """

    def fault(original: Any) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            then(*args, **options)
            return result

        async def awaited(*args: Any, **options: Any) -> Any:
            result = await original(*args, **options)
            await then(*args, **options)
            return result

        return awaited if inspect.iscoroutinefunction(original) else wrapper

    return fault


class Unlimited:
    """A field of a configuration section that is larger than anything counted, whatever it is set to."""

    def __get__(self, section: Any, kind: type | None = None) -> int:
        return 10**9

    def __set__(self, section: Any, value: int) -> None:
        pass


def no_limit(original: int) -> Unlimited:
    """Fault: a field of a section is so large that nothing reaches it."""
    return Unlimited()


@contextmanager
def planted(faults: Mapping[str, Fault]) -> Iterator[None]:
    """Puts the faults (target → fault) in place for the time of the `with` block, of which nothing is left then."""
    forget_calm_runs()
    originals = {target: _found(target)[2] for target in faults}
    with ExitStack() as stack:
        stack.callback(forget_calm_runs)
        for target, fault in faults.items():
            owner, name, original = _found(target)
            stack.enter_context(mock.patch.object(owner, name, fault(original)))
        yield
    assert all(_found(target)[2] is original for target, original in originals.items())


def _found(target: str) -> tuple[Any, str, Any]:
    """Returns the owner of a target, its name there, and the object itself."""
    module_name, _, path = target.partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for part in outer:
        owner = getattr(owner, part)
    return owner, name, inspect.getattr_static(owner, name)


def find_test(path: str) -> Any:
    """Returns the test function that a path such as "tests.unit.package.module:test_name" names.

    The test's folder is on `sys.path` meanwhile, so that the test can import modules beside it as in a run of pytest.
    Not longer: the package tests/unit/examples would hide the folder examples/.
    """
    module_name, _, name = path.partition(":")
    folder = str((Path(__file__).parents[2] / module_name.replace(".", "/")).parent)
    with mock.patch.object(sys, "path", [*sys.path, folder]):
        return getattr(importlib.import_module(module_name), name)
