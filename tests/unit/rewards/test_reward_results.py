"""Tests of a reward's results: those that are accepted, and the messages for those that are refused."""

from typing import Any

import numpy as np
import pytest
import torch

from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.call import Result, group_result, image_result

HERE = "reward 'mine' on prompt 'a cat'"


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2.5],
        (np.float32(1), np.float64(2.5)),
        np.array([1, 2.5], dtype=np.float16),
        torch.tensor([1, 2.5]),
        [torch.tensor(1.0), torch.tensor(2.5)],
        [{"score": 1}, {"score": torch.tensor(2.5)}],
        [{"score": True}, 2.5],
    ],
)
def test_numbers_of_any_kind(returned: Any) -> None:
    assert group_result(HERE, returned, 2) == Result((1.0, 2.5))


def test_a_mapping_per_image_has_a_score_and_extras() -> None:
    result = group_result(HERE, [{"score": 1, "read": "AB", "sure": 0.5}, {"score": 2, "read": "", "sure": True}], 2)
    assert result == Result((1.0, 2.0), {"read": ("AB", ""), "sure": (0.5, 1.0)})
    assert image_result(HERE, {"score": 1, "read": "x" * 600}).extras["read"][0] == "x" * 499 + "…"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (["1.5", "2"], r"must return 2 finite numbers, got \['1.5', '2'\]"),
        ([1.0], r"must return 2 finite numbers, got shape \[1\]"),
        ({"score": 1.0}, "must return 2 finite numbers, or a list with a mapping for each image, got"),
        ([1.0, float("inf")], r"must return 2 finite numbers, got \[1.0, inf\]"),
        ([1.0, 1e300], r"a score is 1e\+300; numbers beyond 1e\+30 overflow in the loss: scale them down"),
        ([{"score": 1, "a": 1}, {"score": 1, "a": "1"}], "as a number here and as text there"),
        ([{"scores": 1}, {"scores": 2}], r"a mapping with 'score', got the keys \['scores'\]"),
        ([{"score": 1, "mean": 2}] * 2, "an extra must not be called 'mean'"),
        ([{"score": 1, "a": float("nan")}] * 2, "the extra 'a' must return one finite number"),
        ([{"score": 1} | {f"a{n}": n for n in range(33)}] * 2, "at most 32 extras, got 33"),
        (torch.ones(2, requires_grad=True), "must return 2 finite numbers, got tensor"),
    ],
)
def test_what_is_no_score_is_refused_in_one_sentence(returned: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message) as error:
        group_result(HERE, returned, 2)
    assert str(error.value).startswith(HERE)
