"""Tests of the prompts that are held out: the text alone decides, and a test file of its own goes first."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_flowrl.data.load import held_out, held_out_by_default
from async_flowrl.data.prompts import PromptError, text_key
from async_flowrl.data.store import shared_texts
from async_flowrl.types import Prompt
from tests.unit.data.prompt_files import lines, load, texts


def test_a_file_of_64_prompts_holds_out_8_and_a_smaller_one_none(tmp_path: Path) -> None:
    small = load(lines(tmp_path / "small.txt", *(f"prompt {i}" for i in range(63)), "prompt 0"))
    assert len(small.train) == 64 and small.evaluation is small.train and "none are held out" in small.chosen
    large = load(lines(tmp_path / "large.txt", *(f"prompt {i}" for i in range(64))))
    assert (len(large.train), len(large.evaluation)) == (56, 8)
    assert shared_texts(large.evaluation, large.train) == 0
    larger = load(lines(tmp_path / "larger.txt", *(f"prompt {i}" for i in range(500))))
    assert (len(larger.train), len(larger.evaluation)) == (484, 16)
    whole = load(tmp_path / "larger.txt", held_out=0)
    assert len(whole.train) == len(whole.evaluation) == 500
    assert [prompt.index for prompt in larger.train] == list(range(484))


def test_a_test_file_of_its_own_is_used_and_nothing_is_held_out(tmp_path: Path) -> None:
    train = lines(tmp_path / "train.txt", *(f"prompt {i}" for i in range(100)))
    test = lines(tmp_path / "test.txt", "prompt 3", "another")
    data = load(train, evaluation=str(test))
    assert len(data.train) == 100 and texts(data.evaluation) == ["prompt 3", "another"]
    assert shared_texts(data.evaluation, data.train) == 1
    with pytest.raises(PromptError, match=r"data\.held_out=0\.1 takes .* but data\.evaluation=.* gives them, too"):
        load(train, evaluation=str(test), held_out=0.1)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=400), st.floats(0, 0.9), st.integers(0, 3))
def test_the_text_decides_alone(numbers: list[int], share: float, seed: int) -> None:
    """So duplicates are on one side, and what a file had before it grew stays on its side."""
    keys = np.array([text_key(Prompt(number, f"prompt {number}")) for number in numbers], np.uint64)
    out = held_out(keys, share, seed)
    side = dict(zip(numbers, out.tolist(), strict=True))
    assert [side[number] for number in numbers] == out.tolist()
    assert held_out(keys[: len(keys) // 2], share, seed).tolist() == out[: len(keys) // 2].tolist()
    chosen = held_out_by_default(keys, seed)
    assert (chosen is None) == (len(side) < 64)
    if chosen is not None:
        assert len({number for number, is_out in zip(numbers, chosen.tolist(), strict=True) if is_out}) == min(
            16, len(side) // 8
        )


def test_share_and_seed(tmp_path: Path) -> None:
    path = lines(tmp_path / "train.txt", *(f"prompt {i}" for i in range(2000)))
    tenth, other = load(path, held_out=0.1), load(path, held_out=0.1, held_out_seed=1)
    assert 150 < len(tenth.evaluation) < 250 and len(tenth.train) + len(tenth.evaluation) == 2000
    assert 0 < shared_texts(tenth.evaluation, other.evaluation) < 60
    with pytest.raises(PromptError, match=r"of the 1 prompts of .* leaves none to (evaluate|train on)"):
        load(lines(tmp_path / "one.txt", "alone"), held_out=0.5)
