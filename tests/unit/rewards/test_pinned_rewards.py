"""Tests of rewards with models whose files are missing, pinned or not to be trusted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from async_flowrl.rewards.aesthetic import Aesthetic
from async_flowrl.rewards.clip import PickScore
from async_flowrl.rewards.hps import HPSv2
from async_flowrl.rewards.weights import check_package
from tests.support.hub import COMMIT


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(ValueError, match=r"HPSv2 reward needs the package no_such_one.*async-flowrl\[hps\]'"):
        check_package("HPSv2", "no_such_one", "hps")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PickScore(revision=COMMIT), r"revision pins only a part .* give processor_revision \(of laion/CLIP"),
        (lambda: HPSv2(model_revision=COMMIT), r"model_revision pins only a part .* give revision \(of xswu/HPSv2\)"),
        (
            lambda: Aesthetic(revision=COMMIT),
            r"give head_revision \(of trl-lib/ddpo-aesthetic-predictor\)",
        ),
    ],
)
def test_a_part_of_a_reward_cannot_be_pinned_alone(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_files_of_this_machine_need_no_pin(tmp_path: Path) -> None:
    PickScore("yuvalkirstain/PickScore_v1", str(tmp_path), revision=COMMIT)
    PickScore("a/model", "a/model", revision=COMMIT)
