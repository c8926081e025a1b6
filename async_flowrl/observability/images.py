"""Image files of evaluations: one grid (a row per prompt), and single files for the report."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from async_flowrl.config.paths import replace_file
from async_flowrl.image_file import opened
from async_flowrl.observability.contact_sheet import contact_sheets
from async_flowrl.types import ByteArray, ConditionImage, Prompt, Scores

Sources = Sequence[Sequence[ConditionImage]]
"""The images that each prompt edits."""

# Characters of a prompt, and images of one, that a grid shows at most.
MAX_SHOWN_CHARACTERS = 500
MAX_COLUMNS = 8
# In pixels: smallest and largest side of a shown image, smallest width of a grid, space between images, height of a
# line of text and of its font.
MIN_SIDE, MAX_SIDE, MIN_WIDTH, GAP, LINE_HEIGHT, FONT_SIZE = 128, 256, 240, 4, 22, 14

# File that describes a folder of single images. It is written last, so a folder with this file is complete.
INDEX = "index.json"
# Folder beside those of evaluations, with each image that a prompt edits once.
SOURCES = "sources"
# Images with at most this many pixels per side are kept as PNG (lossless), larger ones as WebP of WEBP_QUALITY.
MAX_LOSSLESS_SIDE = 128
WEBP_QUALITY = 90
# Of videos that move; that of Wan.
FRAMES_PER_SECOND = 16


def write_images(
    folder: Path, images: Mapping[int, ByteArray], details: Sequence[Mapping[str, Any]], *, most: int, side: int
) -> None:
    """Writes the first `most` images of every prompt as single files; an existing `folder` is replaced.

    `images` maps the prompt's index to uint8 [n, H, W, 3]; videos [n, F, H, W, 3] become animated WebP. Sides above
    `side` pixels are reduced to it. `details` holds one dictionary per prompt in the same order (see `picture_data`),
    which goes into `index.json`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    entries = []
    for (place, group), detail in zip(images.items(), details, strict=True):
        files = []
        for number, image in enumerate(group[:most]):
            small, video = max(image.shape[-3:-1]) <= MAX_LOSSLESS_SIDE, image.ndim == 4
            files.append(f"{place:03d}_{number}.{'png' if small and not video else 'webp'}")
            pictures = [Image.fromarray(frame) for frame in (image if video else image[None])]
            for picture in pictures:
                picture.thumbnail((side, side), Image.Resampling.LANCZOS)
            options = {"lossless" if video else "optimize": True} if small else {"quality": WEBP_QUALITY}
            pictures[0].save(folder / files[-1], **options, **animation(pictures))
        entries.append({"place": place, **detail, "files": files})
    replace_file(folder / INDEX, json.dumps({"prompts": entries}, ensure_ascii=False))


def write_sources(folder: Path, images: Sequence[ConditionImage], side: int) -> list[str]:
    """Writes images that are edited into `folder`/SOURCES, unless they are there; returns their paths below `folder`.

    Sides above `side` pixels are reduced to it. Raises ValueError if a file is gone, or has other bytes.
    """
    (folder / SOURCES).mkdir(parents=True, exist_ok=True)
    paths = [folder / SOURCES / f"{image.sha256[:16]}.webp" for image in images]
    for path, image in zip(paths, images, strict=True):
        if not path.exists():
            picture, unfinished = opened(image), path.with_suffix(".unfinished")
            picture.thumbnail((side, side), Image.Resampling.LANCZOS)
            small = max(picture.size) <= MAX_LOSSLESS_SIDE
            picture.save(unfinished, format="WEBP", **({"lossless": True} if small else {"quality": WEBP_QUALITY}))
            unfinished.replace(path)
    return [path.relative_to(folder).as_posix() for path in paths]


def animation(pictures: Sequence[Image.Image]) -> dict[str, Any]:
    """Returns the options with which the first picture's `save` writes all as one that moves; {} for a single one."""
    if len(pictures) == 1:
        return {}
    moving = {"save_all": True, "append_images": pictures[1:], "loop": 0}
    return {**moving, "duration": 1000 // FRAMES_PER_SECOND}


def write_grid(
    path: Path,
    prompts: Sequence[str],
    images: Sequence[ByteArray],
    scores: Sequence[Scores],
    *,
    title: str = "",
    sources: Sources = (),
) -> None:
    """Writes a PNG file with one row per prompt, of at most MAX_COLUMNS images (see `grid`), its scores below each."""
    said = any(group.extras for group in scores)
    below = [
        [[f"{total:.3f}", *([caption(group.extras, image)] if said else [])] for image, total in enumerate(group.total)]
        for group in scores
    ]
    shown = [(title, [group[:MAX_COLUMNS] for group in images])]
    sheet = grid(prompts, shown, captions=[below], sources=sources)
    sheet.save(path, format="PNG")


def grid(
    prompts: Sequence[str],
    columns: Sequence[tuple[str, Sequence[ByteArray]]],
    *,
    captions: Sequence[Sequence[Sequence[Sequence[str]]]] = (),
    max_side: int = MAX_SIDE,
    sources: Sources = (),
) -> Image.Image:
    """Draws one picture with one row per prompt: its text, and below it its `sources`, if it has any, and its images.

    `columns` holds (title, images uint8 [n, H, W, 3] per prompt); of videos, contact sheets are drawn.
    `captions[column][prompt][image]` are the lines of text below an image. All images are drawn with the same longer
    side in pixels: the longest one of the images, enlarged by a whole factor to MIN_SIDE or more without smoothing, and
    reduced to `max_side` if that is smaller.
    """
    drawn: list[tuple[str, Sequence[Any]]]
    drawn = [(title, [contact_sheets(images) for images in rows]) for title, rows in columns]
    side = max(max(images.shape[1:3]) for _, rows in drawn for images in rows)
    if any(sources):
        drawn.insert(0, ("source", sources))
        captions = [[[()] * len(images) for images in sources], *captions] if captions else ()
    cell = min(side * max(1, -(-MIN_SIDE // side)), max_side)
    widths = [max(map(len, rows)) * (cell + GAP) + 3 * GAP for _, rows in drawn]
    lines = max((len(texts) for column in captions for group in column for texts in group), default=0)
    height = cell + LINE_HEIGHT * (1 + lines)
    width = max(sum(widths) - 4 * GAP, MIN_WIDTH)
    sheet = Image.new("RGB", (width, LINE_HEIGHT + len(prompts) * height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE)
    for at, (title, rows) in enumerate(drawn):
        left = sum(widths[:at])
        draw.text((left, 3), title, fill="black", font=font)
        for row, images in enumerate(rows):
            top = 2 * LINE_HEIGHT + row * height
            for place, pixels in enumerate(images):
                corner = left + place * (cell + GAP)
                whole = opened(pixels) if isinstance(pixels, ConditionImage) else Image.fromarray(pixels)
                resampling = Image.Resampling.LANCZOS if max(whole.size) > cell else Image.Resampling.NEAREST
                picture = ImageOps.contain(whole, (cell, cell), resampling)
                sheet.paste(picture, (corner, top + (cell - picture.height) // 2))
                for line, text in enumerate(captions[at][row][place] if captions else ()):
                    below = top + cell + 2 + line * LINE_HEIGHT
                    draw.text((corner, below), fitted(text, draw, font, cell), fill="dimgrey", font=font)
    for row, prompt in enumerate(prompts):
        shown = fitted(prompt, draw, font, width)
        draw.text((0, LINE_HEIGHT + row * height + 3), shown, fill="dimgrey", font=font)
    return sheet


def fitted(text: str, draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    line = " ".join(text[:MAX_SHOWN_CHARACTERS].split())
    if len(text) <= MAX_SHOWN_CHARACTERS and draw.textlength(line, font=font) <= width:
        return line
    while line and draw.textlength(line + "…", font=font) > width:
        line = line[:-1]
    return line + "…"


def picture_data(prompts: Sequence[Prompt], scores: Sequence[Scores]) -> list[dict[str, Any]]:
    """Per prompt a JSON-able dictionary: its text, and per image total, scores by term and extras by term and name."""
    return [
        {
            "prompt": prompt.text,
            "total": group.total,
            "by_term": dict(group.by_term),
            "extras": {term: dict(by_name) for term, by_name in group.extras.items()},
        }
        for prompt, group in zip(prompts, scores, strict=True)
    ]


def caption(extras: Mapping[str, Mapping[str, Sequence[float | str]]], image: int) -> str:
    """One line with the extras of all terms about an image, texts before numbers."""
    values = [(name, by_image[image]) for by_name in extras.values() for name, by_image in by_name.items()]
    texts = [value for _, value in values if isinstance(value, str) and value]
    numbers = [f"{name} {value:.3g}" for name, value in values if not isinstance(value, str)]
    return " · ".join([*texts, *numbers])
