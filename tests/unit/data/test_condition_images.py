"""Tests of images to edit: how rows name them, what is refused and where, and that their bytes are their identity."""

import base64
import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from async_flowrl.cli.data import main
from async_flowrl.data import condition_images
from async_flowrl.data.prompts import PromptError
from async_flowrl.image_file import decoded as decoded_bytes
from async_flowrl.image_file import opened
from async_flowrl.policies.registry import check_images_of, load_family
from async_flowrl.rollout.text_encoder import EmbeddingFiles
from async_flowrl.types import Prompt
from tests.unit.data.prompt_files import load, rows

RED, SIZE = (200, 10, 10), (24, 40)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    return saved(tmp_path / "a.png")


def saved(path: Path, mode: str = "RGB", size: tuple[int, int] = SIZE, **options: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    color = {"RGB": RED, "RGBA": (*RED, 9), "CMYK": (9, 9, 9, 9)}.get(mode, 9)
    Image.new(mode, size[::-1], color).save(path, **options)
    return path


def test_every_layout_is_read(picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verl-omni's rows hold bytes and mark their places in the text; Flow-Factory's files lie in the folder images."""
    content = picture.read_bytes()
    saved(tmp_path / "images" / "b.png", size=(8, 16))
    file = rows(
        tmp_path / "p.jsonl",
        {"prompt": "one", "image": "a.png"},
        {"prompt": "two", "images": ["a.png", "b.png"], "score": 1},
        {"prompt": "three", "image": {"path": str(picture)}},
        {"prompt": "four", "images": [{"image": f"file://{picture}"}]},
        {"prompt": "five", "image": f"data:image/png;base64,{base64.b64encode(content).decode()}"},
        {"prompt": "six", "image": f"data:image/png;charset=utf-8;base64,{base64.b64encode(content).decode()}"},
        {"prompt": "none", "image": None, "images": []},
    )
    *edits, none = load(file).train
    assert [[image.size for image in prompt.images] for prompt in edits] == [[SIZE], [SIZE, (8, 16)], *[[SIZE]] * 4]
    assert len({prompt.images[0].sha256 for prompt in edits}) == 1 and none.images == ()
    assert [dict(prompt.metadata) for prompt in edits[:2]] == [{}, {"score": 1}]
    assert all(opened(prompt.images[0]).getpixel((0, 0)) == RED for prompt in edits)
    messages = [[{"role": "user", "content": f"Picture 1: <image>{text}"}] for text in ("make it red", " ")]
    table = {"prompt": messages[:1], "negative_prompt": messages[1:], "images": [[{"bytes": content}]]}
    pyarrow.parquet.write_table(pa.table(table), tmp_path / "v.parquet")
    (verl,) = load(tmp_path / "v.parquet").train
    assert (verl.text, verl.negative) == ("make it red", "") and verl.images == edits[0].images
    assert opened(verl.images[0]).size == SIZE[::-1] and not verl.metadata
    picture_part, text_part = {"type": "image"}, {"type": "text", "text": "make it red"}
    chat = {"prompt": [{"role": "user", "content": [picture_part, text_part]}]}
    assert load(rows(tmp_path / "c.jsonl", chat | {"image": "a.png"})).train[0].text == "make it red"
    with pytest.raises(PromptError, match="only text messages"):
        load(rows(tmp_path / "d.jsonl", chat))
    (plain,) = load(tmp_path / "v.parquet", images=False).train
    assert main([str(tmp_path / "v.parquet"), "--no-images"]) == 0 and "to edit" not in capsys.readouterr().out
    assert plain.images == () and plain.text == "Picture 1: <image>make it red"


def test_what_is_refused_is_named_with_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turned = Image.Exif()
    turned[274] = 6
    Image.new("RGB", SIZE[::-1], RED).save(tmp_path / "turned.jpg", exif=turned)
    saved(tmp_path / "grey.png", "L")
    frames = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (0, 99)]
    frames[0].save(tmp_path / "animated.gif", save_all=True, append_images=frames[1:])
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:900])
    (tmp_path / "text.png").write_text("no image")
    wrong = {
        "missing.png": "there is no image",
        "text.png": "is no image that Pillow reads",
        "cut.png": "cannot be decoded",
        saved(tmp_path / "clear.png", "RGBA").name: "has transparency",
        saved(tmp_path / "print.jpg", "CMYK").name: "of mode CMYK",
        "animated.gif": "is animated",
        saved(tmp_path / "large.png", "L", size=(8200, 8200)).name: "8200 × 8200 pixels",
        saved(tmp_path / "long.png", size=(2, 300)).name: "300 × 2 pixels",
        "https://example.org/a.png": "data.images=false",
        base64.b64encode(noise.tobytes()).decode(): "image 1 is no path of a file",
    }
    good = [{"prompt": "ok", "image": name} for name in ("turned.jpg", "grey.png")]
    bad = [{"prompt": "no", "image": name} for name in wrong]
    marks = {"prompt": "Picture 1: <image>a", "images": ["grey.png"] * 2}
    file = rows(tmp_path / "p.jsonl", *good, *bad, marks, {"prompt": "x", "image": "grey.png", "images": ["grey.png"]})
    assert main([str(file)]) == 2
    page = capsys.readouterr().out
    assert "2 of 14 rows can be read" in page and "images     2 to edit, 1 per prompt, of 24 × 40 to 40 × 24 px" in page
    for line, reason in enumerate((*wrong.values(), "2 images, and 1 times <image>", "both image and images"), start=3):
        assert any(f"p.jsonl:{line}:" in row and reason in row for row in page.splitlines()), reason
    with pytest.raises(PromptError, match=r"p\.jsonl:3:"):
        load(file)


def test_a_bad_cell_of_parquet_is_refused_with_its_row(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content, url = picture.read_bytes(), "https://example.org/a.png"
    cells = [{"bytes": content, "path": None}, {"bytes": None, "path": url}, {"bytes": None, "path": None}]
    table = pa.table({"prompt": ["a", "b", "c"], "image": cells})
    pyarrow.parquet.write_table(table, file := tmp_path / "p.parquet")
    assert main([str(file)]) == 2
    page = capsys.readouterr().out
    assert "1 of 3 rows can be read" in page and page.count("image 1 must be the path of a file") == 2
    assert "row 1: image 1" in page and "row 2: image 1" in page
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(picture))  # a file, in which there can be no folder
    with pytest.raises(PromptError, match="ASYNC_FLOWRL_CACHE"):
        load(file)
    with pytest.raises(ValueError, match="hashes of images are kept in"):
        condition_images.examined(picture)


def test_a_cache_on_a_full_disk_keeps_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match="No space left"):
        condition_images.written(b"bytes")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_damaged_file_is_refused_whatever_its_reader_raises() -> None:
    with pytest.raises(ValueError, match=r"^cannot be decoded"):
        decoded_bytes(b"P6")


def test_the_bytes_are_the_identity_and_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(tmp_path / "cache"))
    picture = saved(tmp_path / "a.png")
    file = rows(tmp_path / "p.jsonl", {"prompt": "it", "image": "a.png"}, {"prompt": "it", "image": "b.png"})
    saved(tmp_path / "b.png", size=(8, 16))
    before = load(file).train
    one, other = before
    assert before.duplicates == 0
    decode, decoded = condition_images.decoded, list[int]()
    monkeypatch.setattr(condition_images, "decoded", lambda content: decoded.append(len(content)) or decode(content))
    assert load(file).train.digest == before.digest and decoded == []
    files = EmbeddingFiles(tmp_path / "embeddings", "e" * 64)
    key = (one.wording, None, False)
    assert files.path(key) != files.path((other.wording, None, False))
    assert files.path(key) == files.path((load(copy_of(file, picture)).train[0].wording, None, False))
    decoded.clear()
    Image.new("RGB", SIZE[::-1], (1, 2, 3)).save(picture)
    os.utime(picture, ns=(1, 1))
    changed = load(file).train
    assert len(decoded) == 1 and changed.digest != before.digest
    assert files.path(key) != files.path((changed[0].wording, None, False))
    with pytest.raises(ValueError, match="has changed since the start"):
        opened(one.images[0])
    saved(picture)
    os.utime(picture, ns=(1, 1))  # also where length and time are equal to those before
    assert load(file).train.digest == before.digest
    picture.unlink()
    with pytest.raises(ValueError, match="every node with rollout workers"):
        opened(one.images[0])


def copy_of(file: Path, picture: Path) -> Path:
    """The same prompt and the same bytes in another folder."""
    elsewhere = file.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / picture.name).write_bytes(picture.read_bytes())
    return rows(elsewhere / "p.jsonl", {"prompt": "it", "image": picture.name})


def test_families_take_images_or_refuse_them_by_name(picture: Path) -> None:
    edit = Prompt(0, "it", images=(condition_images.examined(picture),))
    for name, prompt, reason in (
        ("qwen_image", edit, "Qwen-Image makes images from text alone"),
        ("qwen_image_edit", Prompt(0, "it"), "Qwen-Image-Edit needs at least 1 image"),
        ("flux_kontext", replace(edit, images=edit.images * 2), "takes at most 1 image"),
        ("tests.support.video:VideoFamily", edit, "makes images from text alone"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_images_of(load_family(name), prompt)
    check_images_of(load_family("qwen_image"), Prompt(0, "it <|image_pad|>"))
    check_images_of(load_family("qwen_image_edit"), edit)
    for marked in (replace(edit, text="a <|image_pad|>"), replace(edit, negative="<|video_pad|>")):
        with pytest.raises(ValueError, match=r"<\|(image|video)_pad\|> in the place of images"):
            check_images_of(load_family("qwen_image_edit"), marked)
