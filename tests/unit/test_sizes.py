"""Tests of image sizes: accepted notations, the size of each group, and early refusals."""

import json
import math
import re
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from async_flowrl.cli.before_after import Comparison, Row, as_json, check_sizes
from async_flowrl.cli.evaluation_job import Job
from async_flowrl.cli.generate import check_guidance, from_config
from async_flowrl.cli.generate import main as generate
from async_flowrl.cli.model_card import _sizes as sizes_on_card
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config, read_config
from async_flowrl.config.resolution import Resolution, at_size, configured, parse_resolution, written
from async_flowrl.config.schema import Config
from async_flowrl.controller.resume import deciding
from async_flowrl.data.prompts import Keys, digest, read_prompt
from async_flowrl.memory.sizes import at_largest
from async_flowrl.observability.images import write_grid
from async_flowrl.observability.statistics import estimate
from async_flowrl.run.prepare import prepare
from async_flowrl.tickets.arithmetic import ticket_bytes
from async_flowrl.tickets.request import RequestBuilder, evaluation_resolution
from async_flowrl.tickets.table import EVALUATION, TRAIN, Ticket
from async_flowrl.training import rank_model
from async_flowrl.training.worker import TrainerWorker
from async_flowrl.types import Prompt
from tests.support.families import model_config

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


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (32, 32),
        ([32, 48], (32, 48)),
        ((48, 48), 48),
        ("64", 64),
        ("64x32", (64, 32)),
        ("64 × 64", 64),
        ([96], 96),
        (32.0, 32),
        ([32.0, "48"], (32, 48)),
    ],
)
def test_what_may_be_written(value: Any, found: Resolution) -> None:
    assert parse_resolution(value) == found
    assert parse_resolution(written(found)) == found


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "big", [1, 2, 3], [], [32, "4k"], math.nan, None, {"height": 32}])
def test_what_may_not(value: Any) -> None:
    with pytest.raises(ValueError, match=r"an integer, .* or \[height, width\], each at least 1; got"):
        parse_resolution(value)


def test_a_square_is_an_integer_however_it_is_written_and_a_run_is_the_same(tmp_path: Path) -> None:
    plain, listed = composed(tmp_path), composed(tmp_path, "rollout.resolution=[32,32]")
    assert listed.rollout.resolution == 32 and deciding(plain) == deciding(listed)
    wide = composed(tmp_path, "rollout.resolution=[32,48]", "rollout.resolutions=[32,[48,32]]")
    assert wide.rollout.resolution == (32, 48) and wide.rollout.resolutions == [32, (48, 32)]
    sections = "".join(f"{name}: {{}}\n" for name in ("model", "trainer", "reward", "data", "runtime"))
    own = "rollout: {resolution: [32, 48], resolutions: [[64, 64], [32, 64]]}\n"
    (tmp_path / "config.yaml").write_text(sections + own)
    read = read_config(tmp_path / "config.yaml").rollout
    assert (read.resolution, read.resolutions) == ((32, 48), [64, (32, 64)])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.resolution=[32,40]"], r"^resolution must be multiples of 16, got 32 × 40, nearest: 32$"),
        (["rollout.resolution=40"], r"^resolution must be a multiple of 16, got 40, nearest: 32$"),
        (["rollout.resolutions=[32,[50,90]]"], r"rollout\.resolutions: .* got 50 × 90, nearest: 48 × 96$"),
        (["rollout.resolutions=[32,wide]"], r"each of rollout\.resolutions must be an integer, .* got 'wide'$"),
        (["rollout.resolutions=32"], r"rollout\.resolutions must be a list"),
        (["rollout.resolutions=[32,[32,32]]"], r"rollout\.resolutions names a size twice: 32, 32$"),
        (["rollout.resolution=0"], r"rollout\.resolution must be an integer, .* got 0$"),
    ],
)
def test_bad_sizes_are_one_sentence_before_anything_starts(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(composed(tmp_path, *overrides))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"height": 32}, "in resolution, or in height and width, got height"),
        ({"height": 32, "width": 32, "resolution": 32}, "got resolution and height and width"),
        ({"resolution": "4k"}, r"here: resolution must be an integer, .* got '4k'"),
        ({"height": 32, "width": 1.5}, r"here: height and width must be an integer, .* got \[32, 1.5\]"),
    ],
)
def test_a_bad_size_of_a_prompt_names_its_place(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"here: .*{message.removeprefix('here: ')}"):
        read_prompt(0, "here", {"prompt": "red", **row}, Keys())


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


def test_everything_that_is_planned_is_planned_for_the_largest(tmp_path: Path) -> None:
    data = f"data.train={prompt_file(tmp_path, *ROWS)}"
    config = composed(tmp_path, data, "rollout.resolutions=[[32,80],16]")
    prepared = prepare(config)
    assert prepared.sizes == (16, 32, (32, 48), (64, 32), (32, 80))
    assert prepared.at_largest.rollout.resolution == (32, 80) == at_largest(config).rollout.resolution
    assert prepared.shapes.latents == (10, 64)
    whole = ticket_bytes(prepared.at_largest, prepared.shapes)
    assert whole - ticket_bytes(at_size(config, 32), prepared.shapes) == config.images_per_ticket * 3 * (
        32 * 80 - 32 * 32
    )
    assert asdict(at_largest(composed(tmp_path)))["rollout"]["resolution"] == 32


def test_a_prompt_that_the_model_cannot_make_is_named(tmp_path: Path) -> None:
    data = prompt_file(tmp_path, ROWS[0], {"prompt": "red", "resolution": [40, 32]})
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: resolution must be multiples of 16, got 40 × 32"):
        prepare(composed(tmp_path, f"data.train={data}"))


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


def test_tickets_share_a_batch_where_all_that_is_trained_has_one_size(tmp_path: Path) -> None:
    together = ("rollout.tickets_per_batch=2", "data.train=" + prompt_file(tmp_path, ROWS[0], ROWS[0]))
    (other := tmp_path / "evaluation.jsonl").write_text(json.dumps({"prompt": "red", "resolution": 48}) + "\n")
    assert prepare(composed(tmp_path, *together, f"data.evaluation={other}")).sizes == ((32, 48), 48)
    data = f"data.train={prompt_file(tmp_path, *ROWS[:2])}"
    with pytest.raises(ConfigError, match=r"one size, got 32 × 48, 64 × 32 px: set it to 1, or one size$"):
        prepare(composed(tmp_path, "rollout.tickets_per_batch=2", data))


def test_images_after_a_run_have_a_size_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert from_config(composed(tmp_path, "rollout.resolutions=[[64,32],48]")).sampling.resolution == (64, 32)
    out = ["--out", str(tmp_path / "grid.png")]
    assert generate(["--model", "tiny", "--prompt", "red", "--resolution", "40x32", *out]) == 2
    assert "resolution must be multiples of 16, got 40 × 32, nearest: 32" in caplog.text
    assert not (tmp_path / "grid.png").exists()


@pytest.mark.parametrize("scale", ["0.5", "-1", "nan"])
def test_guidance_that_would_be_off_is_refused_for_images(
    scale: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = ["--out", str(tmp_path / "grid.png")]
    assert generate(["--model", "tiny", "--prompt", "red", "--true-cfg-scale", scale, *out]) == 2
    assert caplog.messages == [
        f"async_flowrl: --true-cfg-scale must be above 1, or 0 or 1 for no guidance, got {scale}"
    ]


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen_image", "--guidance-scale is no input of qwen_image, whose guidance is --true-cfg-scale"),
        ("flux", "--guidance-scale must be above 0 for a model that takes guidance as an input, got -1"),
    ],
)
def test_a_guidance_scale_that_the_model_does_not_take_is_refused(family: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_guidance(model_config(family), None, -1.0)


def test_the_command_refuses_a_guidance_scale_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = ["--out", str(tmp_path / "grid.png")]
    assert generate(["--model", "tiny", "--prompt", "red", "--guidance-scale", "3.5", *out]) == 2
    assert caplog.messages == [
        "async_flowrl: --guidance-scale is no input of qwen_image, whose guidance is --true-cfg-scale"
    ]


def test_guidance_that_the_model_takes_is_accepted() -> None:
    check_guidance(model_config("flux"), 1.0, 3.5)
    check_guidance(model_config("qwen_image"), 4.0, None)


def test_a_card_does_not_say_sizes_that_prompts_may_replace(tmp_path: Path) -> None:
    lines, rows = composed(tmp_path, "data.train=prompts.txt"), composed(tmp_path, "data.train=prompts.jsonl")
    assert (sizes_on_card(lines), sizes_on_card(rows)) == ("32 px", "32 px where a prompt brings no size of its own")


def test_an_evaluation_refuses_sizes_before_it_makes_images_and_says_them_plainly(tmp_path: Path) -> None:
    def job(*sizes: Resolution | None, one_size: bool = False) -> Job:
        prompts = [Prompt(place, "red", resolution=size) for place, size in enumerate(sizes)]
        return Job(composed(tmp_path), tmp_path, {}, {}, prompts, "", (0,), one_size)

    check_sizes(job(32, (32, 40), one_size=True))
    with pytest.raises(ValueError, match=r"^prompt 1: resolution must be multiples of 16, got 32 × 40"):
        check_sizes(job(32, (32, 40), (24, 32)))
    half = estimate({0: (0.5,)})
    rows = {"color": Row("asked", 1.0, half, half, half, 0.0, {})}
    said = [as_json(Comparison(each, rows, {}, {}))["resolution"] for each in (job((32, 48)), job(32, 48))]
    assert said == [(32, 48), [(32, 32), (48, 48)]]


def test_a_picture_keeps_the_shape_of_every_image(tmp_path: Path) -> None:
    wide, high = np.full((1, 32, 64, 3), 10, np.uint8), np.full((1, 64, 32, 3), 200, np.uint8)
    write_grid(tmp_path / "grid.png", ["wide", "high"], [wide, high], [(0.1,), (0.2,)])
    pixels = np.asarray(Image.open(tmp_path / "grid.png"))[..., 0].astype(int)
    for value, (height, width) in ((10, (64, 128)), (200, (128, 64))):
        rows, columns = np.nonzero(pixels == value)
        counts = Counter(rows.tolist())
        assert sum(1 for count in counts.values() if count >= width) == height
        assert max(columns) - min(columns) + 1 >= width
