"""Planted faults: a function, method or constant behaves otherwise for as long as a test runs."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

Fault = Callable[[Any], Any]
"""From what is there to what takes its place: usually from a function to one that calls it, but not quite rightly."""


@dataclass(frozen=True)
class Mutant:
    """A planted fault and the test that must fail because of it.

    `faults` by target: "package.module:Class.method", or the name of a module's function or constant.
    `raises`: names of the exceptions by which the test may fail. Anything else (a TypeError, say) is a fault of the
    mutant.
    """

    name: str
    faults: Mapping[str, Fault]
    caught_by: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    raises: tuple[str, ...] = ("AssertionError",)


def nothing(original: Any) -> Callable[..., None]:
    """The function does nothing: what it checks is never refused, what it removes stays."""
    return lambda *args, **options: None


def nothing_awaited(original: Any) -> Any:
    """The same for a coroutine function."""
    return mock.AsyncMock(return_value=None)


def before(first: Callable[..., Any]) -> Fault:
    """Does `first`, with the function's own arguments, before the function."""

    def fault(original: Any) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            first(*args, **options)
            return original(*args, **options)

        return wrapper

    return fault


def after(then: Callable[..., Any]) -> Fault:
    """Does `then`, with the function's own arguments, after the function; awaits it after a coroutine function."""

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


def no_limit(original: int) -> int:
    return 10**9


@contextmanager
def planted(faults: Mapping[str, Fault]) -> Iterator[None]:
    with ExitStack() as stack:
        for target, fault in faults.items():
            module_name, _, path = target.partition(":")
            *outer, name = path.split(".")
            owner: Any = importlib.import_module(module_name)
            for part in outer:
                owner = getattr(owner, part)
            stack.enter_context(mock.patch.object(owner, name, fault(inspect.getattr_static(owner, name))))
        yield


def find_test(path: str) -> Any:
    """The test function "tests.unit.package.module:test_name"; modules beside it can be imported as in a pytest run."""
    module_name, _, name = path.partition(":")
    root = Path(__file__).parents[2]
    folder = str((root / module_name.replace(".", "/")).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return getattr(importlib.import_module(module_name), name)
