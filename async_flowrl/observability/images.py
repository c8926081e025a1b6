"""Pictures of evaluations: grids with a row per prompt, its text above, each image's reward below; and single files."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from async_flowrl.types import ByteArray

MAX_SHOWN_CHARACTERS = 500
"""Of a prompt; more would not fit any line."""
MIN_SIDE, MAX_SIDE, GAP, LINE_HEIGHT, FONT_SIZE = 96, 256, 6, 18, 12
"""Pixels: sides of a shown image, the space between images, the height of a line of text and of its letters."""

INDEX = "index.json"
"""What a folder of single images holds, written last."""
MAX_LOSSLESS_SIDE = 128
"""Pixels: larger images are kept as WebP of quality WEBP_QUALITY, smaller ones as PNG, bit for bit."""
WEBP_QUALITY = 90


def write_images(
    folder: Path, images: Mapping[int, ByteArray], details: Sequence[Mapping[str, Any]], *, most: int, side: int
) -> None:
    """The first `most` images uint8 [n, H, W, 3] of every prompt, by the prompt's place, as files of their own.

    Longer sides than `side` pixels are reduced to it. `details` says of each prompt, in the same order, what belongs to
    it (`extras.picture_data`); that, with each prompt's place and files, is `index.json`. The folder is made new.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    entries = []
    for (place, group), detail in zip(images.items(), details, strict=True):
        files = []
        for number, image in enumerate(group[:most]):
            small = max(image.shape[:2]) <= MAX_LOSSLESS_SIDE
            files.append(f"{place:03d}_{number}.{'png' if small else 'webp'}")
            picture = Image.fromarray(image)
            picture.thumbnail((side, side), Image.Resampling.LANCZOS)
            options = {"optimize": True} if small else {"quality": WEBP_QUALITY}
            picture.save(folder / files[-1], **options)
        entries.append({"place": place, **detail, "files": files})
    temporary = folder / "index.tmp"
    temporary.write_text(json.dumps({"prompts": entries}, ensure_ascii=False), encoding="utf-8")
    temporary.replace(folder / INDEX)


def write_grid(
    path: Path,
    prompts: Sequence[str],
    images: Sequence[ByteArray],
    rewards: Sequence[Sequence[float]],
    *,
    title: str = "",
    columns: int = 8,
    captions: Sequence[Sequence[str]] = (),
    data: Any = None,
) -> None:
    """A PNG of at most `columns` images uint8 [n, H, W, 3] per prompt.

    Small images are enlarged by a whole factor, without smoothing, and large ones reduced to MAX_SIDE pixels. Below an
    image stand its reward and what `captions` has for it, by prompt and image; `data` is kept in the file as JSON, in
    its text `data`. Raises ValueError if the three lists differ in length or are empty.
    """
    if not len(prompts) == len(images) == len(rewards) or not prompts:
        raise ValueError(
            f"prompts, images and rewards must be as many, and at least one; got {len(prompts)}, {len(images)}, "
            f"{len(rewards)}"
        )
    side = _side(max(max(group.shape[1:3]) for group in images))
    width = GAP + min(columns, max(map(len, images))) * (side + GAP)
    head = LINE_HEIGHT if title else 0
    row_height = (3 if captions else 2) * LINE_HEIGHT + side + GAP
    height = head + len(prompts) * row_height
    sheet = Image.new("RGB", (max(width, 240), height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE)
    draw.text((GAP, 2), title, fill="black", font=font)
    for row, (prompt, group, scores) in enumerate(zip(prompts, images, rewards, strict=True)):
        top = head + row * row_height
        draw.text((GAP, top + 2), fitted(prompt, draw, font, sheet.width - 2 * GAP), fill="black", font=font)
        for column, (image, score) in enumerate(zip(group[:columns], scores, strict=False)):
            left = GAP + column * (side + GAP)
            shown = within(image, side)
            sheet.paste(shown, (left, top + LINE_HEIGHT + (side - shown.height) // 2))
            below = (f"{score:.3f}", *(fitted(each[column], draw, font, side) for each in captions[row : row + 1]))
            for line, text in enumerate(below, start=1):
                draw.text((left, top + line * LINE_HEIGHT + side + 1), text, fill=(90, 90, 90), font=font)
    sheet.save(path, format="PNG", optimize=True, pnginfo=_kept(data))


def _kept(data: Any) -> PngInfo | None:
    if data is None:
        return None
    info = PngInfo()
    info.add_itxt("data", json.dumps(data, ensure_ascii=False), zip=True)
    return info


def _side(side: int) -> int:
    return min(side, MAX_SIDE) if side >= MIN_SIDE else side * -(-MIN_SIDE // side)


def within(image: ByteArray, side: int) -> Image.Image:
    """uint8 [H, W, 3] with `side` pixels along its longer side: reduced smoothly, enlarged by repeating pixels."""
    height, width = image.shape[:2]
    longest = max(height, width)
    resampling = Image.Resampling.LANCZOS if longest > side else Image.Resampling.NEAREST
    size = max(1, round(width * side / longest)), max(1, round(height * side / longest))
    return Image.fromarray(image).resize(size, resampling)


def fitted(text: str, draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    """The text on one line, shortened with an ellipsis where it is too long."""
    line = " ".join(text[:MAX_SHOWN_CHARACTERS].split())
    if len(text) <= MAX_SHOWN_CHARACTERS and draw.textlength(line, font=font) <= width:
        return line
    while line and draw.textlength(line + "…", font=font) > width:
        line = line[:-1]
    return line + "…"
