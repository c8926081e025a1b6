"""Tests of image sizes: accepted notations, the size of each group, and early refusals."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.resolution import Resolution, configured
from async_flowrl.config.schema import Config
from async_flowrl.data.prompts import Keys, digest, read_prompt
from async_flowrl.memory.model_sizes import at_largest
from async_flowrl.run.prepare import prepare
from async_flowrl.tickets.request import RequestBuilder, evaluation_resolution
from async_flowrl.tickets.table import EVALUATION, TRAIN, Ticket
from async_flowrl.training import rank_model
from async_flowrl.training.trainer_worker import TrainerWorker
from async_flowrl.types import Prompt

ROWS: list[dict[str, Any]] = [
    {"prompt": "red square", "height": 32, "width": 48},
    {"prompt": "green field", "resolution": [64, 32]},
    {"prompt": "blue all over", "resolution": 32},
    {"prompt": "red flag"},
]


def prompt_file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def composed(folder: Path, *overrides: str) -> Config:
    return compose_config("one_step_off", ["runtime.backend=local", f"output_dir={folder / 'run'}", *overrides])


def test_a_prompt_without_a_size_has_the_digest_it_always_had() -> None:
    plain, sized = read_prompt(0, "", {"prompt": "red"}, Keys()), Prompt(0, "red", resolution=64)
    assert digest(plain) == digest(Prompt(0, "red")) != digest(sized) != digest(replace(sized, resolution=(64, 32)))
    assert read_prompt(0, "", {"prompt": "red", "height": None, "width": None}, Keys()) == plain


def test_a_group_has_one_size_its_prompts_or_one_that_it_draws(tmp_path: Path) -> None:
    config = Config(prompts_per_step=4, group_size=8, ticket_size=4)
    config.rollout.resolutions = [32, (32, 48), (48, 32)]
    config.data.shuffle = False
    prompts = [Prompt(0, "red", resolution=(64, 32)), *(Prompt(i, "red") for i in (1, 2, 3))]
    builder = RequestBuilder(config, prompts, prompts)
    drawn: Counter[Resolution] = Counter()
    for step in range(60):
        for group in range(4):
            tickets = [Ticket(TRAIN, 0, step, group, part, 0) for part in range(2)]
            first, second = (builder.request(ticket).sampling for ticket in tickets)
            assert first == second == builder.sampling(tickets[0])
            if group == 0:
                assert first.resolution == (64, 32)
            else:
                drawn[first.resolution] += 1
    assert set(drawn) == set(configured(config.rollout)) and min(drawn.values()) > 30
    shown = [builder.request(Ticket(EVALUATION, 0, v, 2, 0, v)).sampling.resolution for v in (0, 5, 9)]
    assert shown == [evaluation_resolution(config, 2)] * 3
    other = RequestBuilder(replace(config, seed=1), prompts, prompts)
    tickets = [Ticket(TRAIN, 0, step, 1, 0, 0) for step in range(20)]
    assert [builder.resolution(t) for t in tickets] != [other.resolution(t) for t in tickets]


def test_frames_are_those_of_the_prompt_or_of_the_run(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "frames": "9"}, ROWS[2], {"prompt": "red", "resolution": "5x48x32"}, ROWS[3]]
    wan = ("model=tiny_wan21", "rollout.frames=5", f"data.train={prompt_file(tmp_path, *rows)}", "data.shuffle=false")
    prepared = prepare(composed(tmp_path, *wan, "prompts_per_step=4"))
    sizes = [prepared.requests.resolution(Ticket(TRAIN, 0, 0, group, 0, 0)) for group in range(4)]
    assert sizes == [(9, 32, 48), (5, 32, 32), (5, 48, 32), (5, 32, 32)]
    assert set(prepared.sizes) == set(sizes) and prepared.shapes.latents == (16, 3, 4, 6)
    assert prepared.config.rollout.resolution == (5, 32, 32)
    largest = at_largest(prepared.config).rollout
    assert configured(largest) == configured(prepared.at_largest.rollout) == ((9, 32, 48),)
    assert compose_config("sync", ["model=tiny_wan21", "rollout.resolution=9x32x48"]).rollout.resolution == (9, 32, 48)
    assert compose_config("one_step_off", [*wan, "rollout.resolution=[9,32,48]"]).rollout.resolution == (5, 32, 48)


@pytest.mark.parametrize(
    ("model", "row", "named"),
    [
        ("tiny_wan21", {**ROWS[0], "frames": 10}, r"prompts\.jsonl:2: frames .* 10, nearest: 9"),
        ("tiny", {"prompt": "red", "resolution": [40, 32]}, r"prompts\.jsonl:2: .* multiples of 16, got 40 × 32"),
        ("tiny", {**ROWS[0], "frames": 9}, r"prompts\.jsonl:2: frames .* 9$"),
        ("tiny_wan21", {"prompt": "red", "frames": 9}, r"prompts\.jsonl:2: .*got frames"),
        ("tiny_wan21", {**ROWS[0], "frames": "many"}, r"prompts\.jsonl:2: .*and frames, .*'many'"),
    ],
)
def test_a_prompt_that_cannot_be_made_is_named(tmp_path: Path, model: str, row: dict[str, Any], named: str) -> None:
    data = prompt_file(tmp_path, ROWS[3], row)
    with pytest.raises(ConfigError, match=named):
        prepare(composed(tmp_path, f"model={model}", f"data.train={data}"))


def test_the_trainer_checks_the_schedules_of_the_sizes_that_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, others = prompt_file(tmp_path, *ROWS[:2]), tmp_path / "evaluation.jsonl"
    others.write_text(json.dumps({"prompt": "red", "resolution": 48}) + "\n")
    # No prompt is drawn at rollout.resolution, which the model could not make.
    config = composed(tmp_path, f"data.train={data}", f"data.evaluation={others}", "rollout.resolution=40")
    prepared = prepare(config)
    assert prepared.sizes == ((32, 48), (64, 32), 48) and prepared.trained_sizes == ((32, 48), (64, 32))
    TrainerWorker(prepared.config, prepared.model, 0, "trainer-0", prepared.trained_sizes).load()

    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("no such schedule")

    monkeypatch.setattr(rank_model, "check_schedule", refuse)
    with pytest.raises(ValueError, match=r"^images of 32 × 48 px: no such schedule$"):
        TrainerWorker(prepared.config, prepared.model, 0, "trainer-0", prepared.trained_sizes).load()


@pytest.mark.parametrize("section", ["reward.terms", "evaluate.reward.terms"])
def test_an_evaluated_prompt_is_checked_at_the_size_of_its_images_alone(section: str, tmp_path: Path) -> None:
    (other := tmp_path / "evaluation.txt").write_text("red\n")
    drawn = evaluation_resolution(composed(tmp_path, "rollout.resolutions=[32,48]"), 0)
    for size in (32, 48):
        data = prompt_file(tmp_path, {"prompt": "red", "resolution": size})
        term = f"+{section}.sized={{name: 'tests.unit.rewards.own_rewards:OfOneSize', options: {{size: {size}}}}}"
        files = (f"data.train={data}", f"data.evaluation={other}")
        config = composed(tmp_path, "rollout.resolutions=[32,48]", *files, term)
        if size == drawn:
            prepare(config)
        else:
            with pytest.raises(ConfigError, match=rf"^{other}:1: .*got {drawn}$"):
                prepare(config)


def test_tickets_share_a_batch_where_all_that_is_trained_has_one_size(tmp_path: Path) -> None:
    together = ("rollout.tickets_per_batch=2", "data.train=" + prompt_file(tmp_path, ROWS[0], ROWS[0]))
    (other := tmp_path / "evaluation.jsonl").write_text(json.dumps({"prompt": "red", "resolution": 48}) + "\n")
    assert prepare(composed(tmp_path, *together, f"data.evaluation={other}")).sizes == ((32, 48), 48)
    data = f"data.train={prompt_file(tmp_path, *ROWS[:2])}"
    with pytest.raises(ConfigError, match=r"one size, got 32 × 48, 64 × 32 px: set it to 1, or one size$"):
        prepare(composed(tmp_path, "rollout.tickets_per_batch=2", data))
