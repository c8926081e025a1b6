"""Tests of picture grids and of trackers (TensorBoard, W&B)."""

import hashlib
import json
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence

from async_flowrl.config.schema import MonitorConfig
from async_flowrl.observability.contact_sheet import contact_sheets
from async_flowrl.observability.images import (
    GAP,
    LINE_HEIGHT,
    MIN_SIDE,
    caption,
    picture_data,
    write_grid,
    write_images,
    write_sources,
)
from async_flowrl.observability.monitor import Monitor, run_id
from async_flowrl.observability.statistics import diversity
from async_flowrl.types import ConditionImage, Prompt, Scores


def group(count: int, side: int, value: int) -> np.ndarray[Any, Any]:
    return np.full((count, side, side, 3), value, dtype=np.uint8)


def test_a_grid_shows_every_pixel_of_small_images(tmp_path: Path) -> None:
    images = group(2, 32, 0)
    images[1, 0, 0] = (255, 0, 0)
    write_grid(tmp_path / "grid.png", ["a prompt"], [images], [Scores((0.5, -1.0), {})], title="step 3")
    sheet = np.asarray(Image.open(tmp_path / "grid.png").convert("RGB"))
    top, left = 2 * LINE_HEIGHT, MIN_SIDE + GAP
    assert (sheet[top : top + 4, left : left + 4] == (255, 0, 0)).all()
    assert (sheet[top + 4 : top + MIN_SIDE, left : left + MIN_SIDE] == 0).all()
    assert (sheet[:LINE_HEIGHT] != 255).any()


@pytest.fixture
def red(tmp_path: Path) -> ConditionImage:
    path = tmp_path / "red.png"
    Image.new("RGB", (600, 300), (255, 0, 0)).save(path)
    return ConditionImage(hashlib.sha256(path.read_bytes()).hexdigest(), (300, 600), str(path))


def test_a_grid_shows_sources_before_results(tmp_path: Path, red: ConditionImage) -> None:
    images, scores = [group(2, 32, 0), group(2, 32, 0)], [Scores((0.5, -1.0), {})] * 2
    write_grid(tmp_path / "plain.png", ["a", "b"], images, scores)
    write_grid(tmp_path / "edits.png", ["a", "b"], images, scores, sources=[(red,), ()])
    plain, sheet = (np.asarray(Image.open(tmp_path / f"{name}.png")).astype(int) for name in ("plain", "edits"))
    width = MIN_SIDE + 4 * GAP
    assert sheet.shape == (plain.shape[0], plain.shape[1] + width, 3)
    reds = np.argwhere((sheet == (255, 0, 0)).all(axis=-1))
    top = 2 * LINE_HEIGHT + MIN_SIDE // 4
    assert reds.min(axis=0).tolist() == [top, 0] and len(reds) == MIN_SIDE * MIN_SIDE // 2
    assert (sheet[2 * LINE_HEIGHT :, width:] == plain[2 * LINE_HEIGHT :]).mean() > 0.95


def test_a_source_is_written_once(tmp_path: Path, red: ConditionImage) -> None:
    (file,) = write_sources(tmp_path / "images", [red], 200)
    path = tmp_path / "images" / file
    assert Image.open(path).size == (200, 100) and [each.name for each in path.parent.iterdir()] == [path.name]
    Path(red.path).unlink()
    assert write_sources(tmp_path / "images", [red], 200) == [file]
    with pytest.raises(ValueError, match=re.escape(red.path)):
        write_sources(tmp_path / "other", [red], 200)


def test_a_grid_shows_and_keeps_what_rewards_say_of_its_images(tmp_path: Path) -> None:
    said = {"ocr": {"read": ("HELLO", ""), "sure": (0.25, 0.5)}}
    scores = Scores((0.5, -1.0), {"ocr": (0.5, -1.0)}, extras=said)
    assert [caption(said, image) for image in (0, 1)] == ["HELLO · sure 0.25", "sure 0.5"]
    write_grid(tmp_path / "said.png", ["a sign"], [group(2, 96, 0)], [scores])
    line = np.asarray(Image.open(tmp_path / "said.png").convert("L"))[-LINE_HEIGHT:]
    assert (line[:, :192] < 255).any(), "nothing stands below the first image"
    (kept,) = picture_data([Prompt(0, "a sign")], [scores])
    assert (kept["prompt"], kept["extras"]["ocr"]["read"], kept["total"]) == ("a sign", ("HELLO", ""), (0.5, -1.0))


def test_tensorboard_files_hold_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = MonitorConfig(tensorboard=True)
    monitor = Monitor(config, tmp_path, name="run", settings={})
    write_grid(tmp_path / "grid.png", ["p"], [group(1, 16, 0)], [Scores((0.0,), {})])
    monitor.log(0, {"step": 0, "reward/mean": 0.5, "note": None})
    monitor.log(1, {"step": 1, "reward/mean": 0.75})
    monitor.evaluation(1, {"reward/mean": 0.6})
    monitor.image(tmp_path / "grid.png", 1)
    monitor.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("evaluation/reward/mean")] == [(1, pytest.approx(0.6))]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(0, 0.5), (1, 0.75)]
    assert events.Tags()["images"] == ["images"]
    assert sorted(events.Tags()["scalars"]) == ["evaluation/reward/mean", "reward/mean"]


@pytest.mark.extended
def test_wandb_gets_images_with_captions_a_table_with_sources_and_the_names_of_verl_omni(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, red: ConditionImage
) -> None:
    records = logged_offline(tmp_path, monkeypatch, (red,))
    (shown,) = (r for r in records if "evaluation/samples/captions" in r)
    assert shown["evaluation/samples/captions"] == ["a cat | reward 0.25", "a dog | reward 0.75"]
    (path,) = (r["evaluation/table/path"] for r in records if "evaluation/table/path" in r)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    table = json.loads((folder / "files" / path).read_text())
    assert table["columns"] == ["version", "prompt", "source", "image", "reward", "ocr"]
    rows = [[1, "a cat", "Image", "Image", 0.25, 0.5], [1, "a dog", None, "Image", 0.75, 1.5]]
    assert table["data"] == rows
    steps = [r for r in records if "reward/mean" in r]
    assert [r["critic/rewards/mean"] for r in steps] == [r["reward/mean"] for r in steps]
    assert [r["training/global_step"] for r in steps] == [0, 1, 2]


def test_a_resumed_run_goes_on_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged_offline(tmp_path, monkeypatch)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    folder.rename(folder.with_name("offline-run-first"))  # W&B names folders by the second.
    logged_offline(tmp_path, monkeypatch)
    first, second = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert first.stem == second.stem == f"run-{run_id(tmp_path / 'wandb')}"
    assert run_id(tmp_path / "other") != run_id(tmp_path / "wandb")


def logged_offline(
    folder: Path, monkeypatch: pytest.MonkeyPatch, images: tuple[ConditionImage, ...] = ()
) -> list[dict[str, Any]]:
    """What W&B's newest file of an offline run holds after three steps, with an evaluation of version 1 behind them."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = MonitorConfig(wandb=True, metric_aliases="verl_omni", wandb_tags=["tried"])
    monitor = Monitor(config, folder, name="run", settings={})
    write_grid(folder / "grid.png", ["p"], [group(1, 16, 0)], [Scores((0.0,), {})])
    for step in range(3):
        monitor.log(step, {"step": step, "reward/mean": 0.5 + step / 10, "kept_of/0": 3, "kept_of/1": 5})
    monitor.evaluation(1, {"reward/mean": 0.25})
    monitor.image(folder / "grid.png", 1)
    pictures = group(2, 16, 0)
    scores = [Scores((0.25,), {"ocr": (0.5,)}), Scores((0.75,), {"ocr": (1.5,)})]
    monitor.samples(1, [Prompt(0, "a cat", images=images), Prompt(1, "a dog")], [pictures[:1], pictures[1:]], scores)
    monitor.close()
    assert monitor.failures == []
    file = max((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    while "exit" not in {record.WhichOneof("record_type") for record in wandb_records(file)}:
        time.sleep(0.1)  # W&B's own process writes on for a while
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(file)
        if record.history.item
    ]


def wandb_records(file: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    return [wandb_internal_pb2.Record.FromString(data) for data in leveldb_records(file.read_bytes())]


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB, the first with 7 bytes of W&B in front, made of pieces with
    a checksum [4], a length [2] and a kind [1]: 1 is a whole record, 2, 3 and 4 its first, middle and last piece.
    The log may still be written: its last piece is passed over while a part of it is missing."""
    position, whole = 7, b""
    while position + 7 <= len(log):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        size, kind = struct.unpack_from("<HB", log, position + 4)
        if position + 7 + size > len(log):
            return
        whole += log[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def test_small_images_are_kept_bit_for_bit_and_large_ones_reduced(tmp_path: Path) -> None:
    small = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    large = np.full((1, 300, 600, 3), 200, dtype=np.uint8)
    details = [{"prompt": "a", "extras": {}}, {"prompt": "b", "extras": {}}]
    write_images(tmp_path / "step", {4: small, 0: large}, details, most=2, side=200)
    index = json.loads((tmp_path / "step" / "index.json").read_text())["prompts"]
    assert [(each["place"], each["prompt"], each["files"]) for each in index] == [
        (4, "a", ["004_0.png", "004_1.png"]),
        (0, "b", ["000_0.webp"]),
    ]
    assert (np.asarray(Image.open(tmp_path / "step" / "004_1.png")) == small[1]).all()
    shown = Image.open(tmp_path / "step" / "000_0.webp")
    assert shown.size == (200, 100) and abs(int(np.asarray(shown)[50, 50, 0]) - 200) < 4


def test_an_evaluation_that_is_made_again_replaces_its_images(tmp_path: Path) -> None:
    images = {0: np.zeros((2, 8, 8, 3), dtype=np.uint8)}
    for most in (2, 1):
        write_images(tmp_path / "step", images, [{"prompt": "a", "extras": {}}], most=most, side=64)
    assert sorted(path.name for path in (tmp_path / "step").iterdir()) == ["000_0.png", "index.json"]


def test_videos_move_and_their_diversity_is_that_of_contact_sheets(tmp_path: Path) -> None:
    frames = np.arange(7, dtype=np.uint8)[None, :, None, None, None] * np.ones((2, 7, 8, 16, 3), dtype=np.uint8)
    write_images(tmp_path / "step", {0: frames}, [{"prompt": "a"}], most=1, side=200)
    with Image.open(tmp_path / "step" / "000_0.webp") as shown:
        seen = [np.asarray(frame.convert("RGB"))[0, 0, 0] for frame in ImageSequence.Iterator(shown)]
        assert shown.size == (16, 8) and seen == list(range(7)) and shown.info["loop"] == 0
    assert contact_sheets(frames)[0, 0, ::16, 0].tolist() == [0, 2, 4, 6]
    assert diversity(frames) == 0.0 and diversity(np.stack([frames[0], frames[0] + 51])) == pytest.approx(0.2)
