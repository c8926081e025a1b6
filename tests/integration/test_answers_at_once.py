"""Test that commands which only answer take at most a second of CPU, in processes of their own."""

from statistics import median

import pytest

from tests.performance.answers import ANSWERS, MOST_SECONDS, TORCH, TORCH_SECONDS, cpu_seconds

ROUNDS = 3


@pytest.fixture(scope="module")
def torch_seconds() -> list[float]:
    """CPU seconds to import torch, round by round: what the machine takes now for a known piece of work."""
    return [cpu_seconds(*TORCH) for _ in range(ROUNDS)]


@pytest.mark.serial("runs")
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_takes_less_than_a_second_of_cpu(name: str, torch_seconds: list[float]) -> None:
    """A busy machine takes longer for everything, so that the limit is a share of the import of torch."""
    taken = [cpu_seconds(*ANSWERS[name]) for _ in range(ROUNDS)]
    limit = MOST_SECONDS / TORCH_SECONDS * median(torch_seconds)
    assert median(taken) <= limit, f"{taken} s of CPU, while the import of torch takes {torch_seconds} s"
