"""Tests that every planted fault is caught by the test and the exception that its Mutant names."""

import inspect
import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mutants.batches import BATCH_FAULTS, EVALUATION_FAULTS
from tests.mutants.mutation import Mutant, find_test, planted
from tests.mutants.recovery import ATTEMPT_FAULTS, WORKER_FAULTS
from tests.mutants.shared import SHARED_FAULTS
from tests.mutants.shares import SHARE_FAULTS
from tests.mutants.tickets import TICKET_FAULTS
from tests.mutants.weights import TENSOR_FAULTS, WEIGHT_FAULTS
from tests.support.virtual import run_virtual

MUTANTS = (
    *(*TICKET_FAULTS, *EVALUATION_FAULTS, *BATCH_FAULTS, *WEIGHT_FAULTS, *TENSOR_FAULTS, *WORKER_FAULTS),
    *(*ATTEMPT_FAULTS, *SHARED_FAULTS, *SHARE_FAULTS),
)


def call(mutant: Mutant) -> None:
    test = find_test(mutant.caught_by)
    wanted = inspect.signature(test).parameters
    with ExitStack() as stack:
        fixtures: dict[str, object] = {}
        if "monkeypatch" in wanted:
            fixtures["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
        if "tmp_path" in wanted:
            fixtures["tmp_path"] = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if inspect.iscoroutine(running := test(**mutant.arguments, **fixtures)):
            run_virtual(running)


def failure(mutant: Mutant) -> BaseException | None:
    try:
        call(mutant)
    except (Exception, pytest.fail.Exception) as error:
        return error
    return None


def among(items: Sequence[pytest.Item], mutant: Mutant) -> bool:
    """Whether the mutant's test is itself among the tests of a session, with the same arguments."""
    module, _, name = mutant.caught_by.partition(":")
    return any(
        isinstance(item, pytest.Function)
        and (item.originalname, item.module.__name__) == (name, module)
        and (item.callspec.params if hasattr(item, "callspec") else {}) == mutant.arguments
        for item in items
    )


@pytest.mark.extended
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_named_test_catches_the_mutant(mutant: Mutant, request: pytest.FixtureRequest) -> None:
    with planted(mutant.faults):
        error = failure(mutant)
    assert error is not None, f"{mutant.caught_by} does not notice"
    assert type(error).__name__ in mutant.raises, f"fails by {error!r} instead of {mutant.raises}"
    if not among(request.session.items, mutant):
        call(mutant)  # it passes without the fault; otherwise the session says so


def test_no_name_is_there_twice_and_the_page_says_how_many_there_are() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
    page = (Path(__file__).parents[2] / "docs" / "guarantees.md").read_text(encoding="utf-8")
    assert re.findall(r"(\d+) planted faults", page) == [str(len(names))]
