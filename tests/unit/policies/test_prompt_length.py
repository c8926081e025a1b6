"""Tests of what is said of prompts that are longer than the text encoder reads, for every family."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.policies.registry import PromptCheck, load_policy, resolve_model, shapes_of
from async_flowrl.run.describe import first_lines
from async_flowrl.run.prepare import prepare
from async_flowrl.types import Prompt
from tests.support.families import model_config

LIMIT = 32
LONG = " ".join(f"word {number}" for number in range(60))


def test_a_prompt_is_cut_where_the_encoder_stops_reading(family: str) -> None:
    model = resolve_model(replace(model_config(family), max_sequence_length=LIMIT))
    if family == "qwen_image_21":  # Its pipeline has no limit but the number of positions, and cuts nothing.
        with pytest.raises(ValueError, match=r"leave model\.max_sequence_length out"):
            shapes_of(model, 32)
        lengths = PromptCheck(replace(model, max_sequence_length=None))
        assert lengths.read(Prompt(1, LONG)) is None
        # A token is a byte here, and <|im_start|> is one.
        assert lengths.read(Prompt(2, "x" * 8300)) == 8191 - len("<user\n")
        return
    policy = load_policy(model, dtype="float32", device="cpu", parts="all")
    lengths = PromptCheck(model)
    assert lengths.read(Prompt(0, "short")) is None
    read = lengths.read(Prompt(1, LONG))
    assert read is not None and 8 < read < len(LONG)

    def encoded(text: str) -> np.ndarray:
        """Without SD3's tokens of CLIP, which has a limit of its own."""
        found: np.ndarray = policy.encode([text])[0]["prompt_embeds"]
        return found[-LIMIT:]

    whole = encoded(LONG)
    assert np.array_equal(encoded(LONG[: read + 8] + " other ends"), whole)
    assert not np.array_equal(encoded(LONG[: read - 8] + " other ends" * 20), whole)


def test_a_target_behind_the_cut_is_refused_and_the_others_are_counted(tmp_path: Path) -> None:
    model = resolve_model(replace(model_config("qwen_image"), max_sequence_length=LIMIT))
    lengths = PromptCheck(model)
    for prompt in (Prompt(0, LONG, target="word 1"), Prompt(1, LONG), Prompt(2, "word 59", target="word 59")):
        lengths(prompt)
    assert lengths.cut == 2
    with pytest.raises(ValueError, match=r"^the prompt .*target 'word 59'.*model\.max_sequence_length$"):
        lengths(Prompt(3, LONG, target="word 59"))
    file = tmp_path / "prompts.txt"
    file.write_text(f"red {LONG}\nred {LONG} again\nred\n")
    config = compose_config("one_step_off", [f"data.train={file}", f"model.max_sequence_length={LIMIT}"])
    assert "2 of them longer" in " ".join(first_lines(prepare(config), tmp_path).split())
    file = tmp_path / "targets.jsonl"
    file.write_text(f'{{"prompt": "{LONG}", "target": "word 59"}}\n')
    ocr = compose_config("one_step_off", [f"data.train={file}", f"model.max_sequence_length={LIMIT}", "reward=ocr"])
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(file))}:1: .*target 'word 59'"):
        prepare(ocr)
    # What no reward looks at may be cut.
    assert PromptCheck(model, targets=False)(Prompt(3, LONG, target="word 59")) is None
