"""Tests of the lengths of prompts in plans: padding as in the run's batches, memory of the longest, mean durations."""

from pathlib import Path

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.processes import plan_memory
from async_flowrl.memory.text_lengths import BYTES_PER_TOKEN, USUAL_TOKENS, TextLengths, text_lengths, tokens_of
from async_flowrl.plan.size_costs import size_costs
from async_flowrl.types import Prompt

LONG = round(300 * BYTES_PER_TOKEN)
"""Bytes of a prompt of 300 planned tokens."""


def configured(folder: Path, lengths: list[int], *settings: str, family: str = "qwen_image") -> Config:
    """A run on prompts of these numbers of bytes, in the order of the file, four per step; all are evaluated, too."""
    path = folder / "prompts.txt"
    path.write_text("".join(f"{index:03d}".ljust(length, "a") + "\n" for index, length in enumerate(lengths)))
    given = [f"data.train={path}", "data.shuffle=false", "prompts_per_step=4", f"model.tiny.family={family}"]
    given += ["rollout.guidance_scale=3.5"] if family == "flux" else []
    return compose_config("one_step_off", [*given, *settings])


def test_a_prompt_counts_by_its_bytes_and_token_ids_by_their_number() -> None:
    assert tokens_of(Prompt(0, "short")) == USUAL_TOKENS
    assert tokens_of(Prompt(0, "é" * LONG)) == 600
    assert tokens_of(Prompt(0, "", token_ids=tuple(range(500)))) == 500


def test_batches_pad_to_their_longest_prompt_in_the_order_in_which_the_run_takes_them(tmp_path: Path) -> None:
    """By length: 128 and 128, then 200 and 300. By number it would be 300 and 300."""
    lengths = [10, LONG, 10, round(200 * BYTES_PER_TOKEN)]
    whole = ("total_steps=1", "ticket_size=null")
    assert text_lengths(configured(tmp_path, lengths, *whole)) == TextLengths(300, (128 + 128 + 200 + 300) / 4)
    batched = configured(tmp_path, lengths, *whole, "rollout.tickets_per_batch=2")
    assert text_lengths(batched) == TextLengths(300, (128 + 128 + 300 + 300) / 4)


def test_without_the_file_or_with_short_prompts_they_are_the_usual_ones(tmp_path: Path) -> None:
    assert text_lengths(configured(tmp_path, [10, 20, 30])) == TextLengths()
    config = configured(tmp_path, [10])
    config.data.train = str(tmp_path / "none.txt")
    assert text_lengths(config) == TextLengths(USUAL_TOKENS, USUAL_TOKENS)


def test_a_file_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    assert text_lengths(configured(tmp_path, [10, LONG])).longest == 300
    assert text_lengths(configured(tmp_path, [10, 2 * LONG])).longest == 600


def test_a_relative_path_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, length in (("short", 10), ("long", LONG)):
        (tmp_path / name).mkdir()
        config = configured(tmp_path / name, [10, length])
        monkeypatch.chdir(tmp_path / name)
        config.data.train = "prompts.txt"
        assert text_lengths(config).longest == (USUAL_TOKENS if name == "short" else 300)


@pytest.mark.parametrize(
    ("family", "grows"), [("qwen_image", True), ("flux", False), pytest.param("z_image", True, marks=pytest.mark.slow)]
)
def test_memory_is_planned_for_the_longest_prompt(tmp_path: Path, family: str, grows: bool) -> None:
    """FLUX.1 pads every prompt to one length."""
    few, many = (tmp_path / name for name in ("few", "many"))
    few.mkdir()
    many.mkdir()
    short = plan_memory(configured(few, [10, 20], family=family))
    long = plan_memory(configured(many, [10, LONG], family=family))
    assert (long.peaks.sampling > short.peaks.sampling) is grows
    assert (long.peaks.training > short.peaks.training) is grows
    assert (long.ticket_bytes > short.ticket_bytes) is grows


def test_durations_are_of_the_mean_padded_prompt_and_not_of_the_longest(tmp_path: Path) -> None:
    config = configured(tmp_path, [10, 10, 10, LONG], "total_steps=1")
    ((size, cost),) = size_costs(config).costs.items()
    assert size == config.rollout.resolution and 0.4 < cost < 0.9
    assert "and the longest prompt" in size_costs(config).sentence()
    batched = configured(tmp_path, [10, 10, 10, LONG], "total_steps=1", "rollout.tickets_per_batch=2")
    assert cost < size_costs(batched).mean < 1.0, "with the long one another is padded"
