"""Tests of keys in the words of other projects: a refusal names ours, as the pages of docs/come_from/ do."""

import re
from pathlib import Path

import pytest

from async_flowrl.config.check import ConfigError, all_keys, names_elsewhere
from async_flowrl.config.compose import compose_config

PAGES = Path(__file__).parents[3] / "docs" / "come_from"
NO_SETTING = {
    "GRPOConfig", "TrainingArguments", "config_file", "f", "num_batches_per_epoch", "parameter_sync_step",
    "peft_config", "per_prompt_stat_tracking", "prompt_fn", "reward_weights", "separate_async", "train",
    "vllm_mode",
}  # fmt: skip
"""Names on the left of the pages that no key stands for."""


def rows() -> list[tuple[set[str], set[str]]]:
    """The rows of all pages: names on the left without what they stand in, and keys on the right."""
    found = []
    for page in PAGES.glob("*.md"):
        for left, right in re.findall(r"^\| (.+?) \| (.+) \|$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            plain = re.sub(r"\([^`]*`[^)]*\)", "", left)  # values stand in parentheses
            names = {
                re.split(r"[=(:\[ ]", each)[0].rpartition(".")[2].strip("…") for each in re.findall("`(.+?)`", plain)
            }
            keys = {re.split(r"[=(:\[ ]", each)[0] for each in re.findall("`(.+?)`", right)}
            found.append(({name for name in names if re.fullmatch(r"\w+", name)}, keys & set(all_keys())))
    return found


@pytest.mark.extended
def test_the_table_and_the_pages_say_the_same() -> None:
    table = {(name.rpartition(".")[2], key) for key, names in names_elsewhere().items() for name in names.split()}
    ours = {(name, key) for name, key in table if key in all_keys()}
    pages = {(name, key) for names, keys in rows() for name in names for key in keys}
    assert ours <= pages and ours
    own = {key.rpartition(".")[2] for key in all_keys()} | NO_SETTING
    assert {name for names, _ in rows() for name in names} - own == {name for name, _ in table} - own


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("lr", "trainer.learning_rate"),
        ("trainer.gradient_accumulation_steps", "trainer.micro_batch_size or trainer.updates_per_batch"),
        ("monitor.wandb_mode", "the environment variable WANDB_MODE"),
        ("algorithm.adv_estimator", "algorithm"),
        ("config.train.beta", "algorithm.kl_coef or algorithm.beta"),
        ("actor_rollout_ref.rollout.n", "group_size"),
        ("trainer.rank", "lora.rank"),
        ("steps", "total_steps or profile.steps"),
        ("config.reward_fn.ocr", "reward.terms"),
        ("rollout.name", "rollout.engine"),
        ("trainer.batch_size", "trainer.micro_batch_size or rollout.batch_size"),
    ],
)
def test_a_refusal_names_our_key(key: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(key)} is unknown: here it is {re.escape(ours)}$"):
        compose_config(overrides=[f"+{key}=1"])


def test_the_name_of_a_term_is_no_name_of_another_project() -> None:
    with pytest.raises(ConfigError, match=r"reward\.terms\.guidance\.weihgtt .*did you mean 'weight'"):
        compose_config(overrides=["+reward.terms.guidance={weight: 1}", "+reward.terms.guidance.weihgtt=2"])
