"""Image files of evaluations: one grid (a row per prompt), and single files for the report."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from async_flowrl.types import ByteArray

MAX_SHOWN_CHARACTERS = 500
"""Characters of a prompt that a grid may show at most."""
MIN_SIDE, MAX_SIDE, GAP, LINE_HEIGHT, FONT_SIZE = 96, 256, 6, 18, 12
"""In pixels: smallest and largest side of a shown image, space between images, height of a line and of its font."""

INDEX = "index.json"
"""File that describes a folder of single images. It is written last, so a folder with this file is complete."""
MAX_LOSSLESS_SIDE = 128
"""Images with at most this many pixels per side are kept as PNG (lossless), larger ones as WebP of WEBP_QUALITY."""
WEBP_QUALITY = 90


def write_images(
    folder: Path, images: Mapping[int, ByteArray], details: Sequence[Mapping[str, Any]], *, most: int, side: int
) -> None:
    """Writes the first `most` images of every prompt as single files; an existing `folder` is replaced.

    `images` maps the prompt's index to uint8 [n, H, W, 3]. Sides above `side` pixels are reduced to it. `details` holds
    one dictionary per prompt in the same order (see `extras.picture_data`); it goes into `index.json` together with
    `place` (the prompt's index) and `files` (the names of its images).
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
    """Writes a PNG file with one row per prompt: its text, and below it at most `columns` of its images.

    `images[i]` is uint8 [n, H, W, 3] of prompt i and `rewards[i]` its n rewards; each reward is shown below its image,
    and `captions[i][j]` below that. Small images are enlarged without smoothing, large ones reduced to MAX_SIDE pixels.
    `data` is stored as JSON in the PNG's text chunk "data" (None: no chunk). Raises ValueError if prompts, images and
    rewards differ in length or are empty.
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
    sheet.save(path, format="PNG", pnginfo=_kept(data))


def _kept(data: Any) -> PngInfo | None:
    if data is None:
        return None
    info = PngInfo()
    info.add_itxt("data", json.dumps(data, ensure_ascii=False), zip=True)
    return info


def _side(side: int) -> int:
    return min(side, MAX_SIDE) if side >= MIN_SIDE else side * -(-MIN_SIDE // side)


def within(image: ByteArray, side: int) -> Image.Image:
    """The image uint8 [H, W, 3] scaled to `side` pixels along its longer side (Lanczos if reduced, else nearest)."""
    height, width = image.shape[:2]
    longest = max(height, width)
    resampling = Image.Resampling.LANCZOS if longest > side else Image.Resampling.NEAREST
    size = max(1, round(width * side / longest)), max(1, round(height * side / longest))
    return Image.fromarray(image).resize(size, resampling)


def fitted(text: str, draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    """The text on one line, shortened with an ellipsis if it is wider than `width` pixels."""
    line = " ".join(text[:MAX_SHOWN_CHARACTERS].split())
    if len(text) <= MAX_SHOWN_CHARACTERS and draw.textlength(line, font=font) <= width:
        return line
    while line and draw.textlength(line + "…", font=font) > width:
        line = line[:-1]
    return line + "…"
