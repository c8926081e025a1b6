"""Tests of the length of the longest prompt in plans."""

from pathlib import Path

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.footprints import plan_memory
from async_flowrl.memory.rehearsed import sampling_bytes, training_peak
from async_flowrl.policies.pipeline import BYTES_PER_TOKEN, USUAL_TOKENS, estimated_tokens

LONG = round(300 * BYTES_PER_TOKEN)
"""Bytes of a prompt of 300 planned tokens."""


def configured(folder: Path, lengths: list[int], *settings: str, family: str = "qwen_image") -> Config:
    """A run on prompts of these numbers of bytes, in the order of the file, four per step; all are evaluated, too."""
    path = folder / "prompts.txt"
    path.write_text("".join(f"{index:03d}".ljust(length, "a") + "\n" for index, length in enumerate(lengths)))
    given = [f"data.train={path}", "data.shuffle=false", "prompts_per_step=4"]
    given += ["model.tiny.layers=1", f"model.tiny.family={family}"]
    given += ["rollout.guidance_scale=3.5"] if family == "flux" else []
    return compose_config("one_step_off", [*given, *settings])


def test_a_prompt_counts_by_its_bytes_and_token_ids_by_their_number() -> None:
    assert estimated_tokens("short") == USUAL_TOKENS
    assert estimated_tokens("é" * LONG) == 600
    assert estimated_tokens(tuple(range(500))) == 500


@pytest.mark.extended
@pytest.mark.parametrize(
    ("family", "grows"),
    [
        ("qwen_image", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("flux", False), ("z_image", True))),
    ],
)
def test_memory_is_planned_for_the_longest_prompt(tmp_path: Path, family: str, grows: bool) -> None:
    """FLUX.1 pads every prompt to one length."""
    few, many = (tmp_path / name for name in ("few", "many"))
    few.mkdir()
    many.mkdir()
    short, long = configured(few, [10, 20], family=family), configured(many, [10, LONG], family=family)
    assert (sampling_bytes(long) > sampling_bytes(short)) is grows
    assert (training_peak(long) > training_peak(short)) is grows
    assert (plan_memory(long).ticket_bytes > plan_memory(short).ticket_bytes) is grows
