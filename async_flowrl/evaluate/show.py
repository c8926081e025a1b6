"""Output of a `Comparison`: table, JSON and picture."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from async_flowrl.config.resolution import Resolution, height_width, in_words, pixels
from async_flowrl.evaluate.job import TOTAL
from async_flowrl.evaluate.measure import SHOWN_IMAGES, Comparison
from async_flowrl.generate import from_config
from async_flowrl.observability.images import grid
from async_flowrl.observability.statistics import Estimate
from separation.table import format_table

RESULTS, GRID = "evaluation.json", "before_after.png"
_MAX_SCORES = 4
"""Largest number of score lines below an image."""


def table(comparison: Comparison) -> str:
    """One row per score: means ± half their 95 % intervals before and after, and the paired difference likewise."""
    job, how = comparison.job, from_config(comparison.job.config).sampling
    sizes = sizes_of(comparison)
    title = (
        f"{len(job.prompts)} prompts ({job.chosen}) × {job.images_per_prompt} images, {how.num_inference_steps} steps "
        f"at {', '.join(map(in_words, sizes))} px, guidance {how.guidance_scale or how.true_cfg_scale:g}"
    )
    rows = []
    for name, row in comparison.rows.items():
        label = name if name == TOTAL or row.kind != "held_out" else f"{name} (held out)"
        rows.append((label, _mean(row.before), _mean(row.after), _difference(row.difference), f"{row.improved:.0%}"))
    return f"{title}\n{format_table(('score', 'before', 'after', 'difference [95 %]', 'images improved'), rows)}\n"


def sizes_of(comparison: Comparison) -> list[Resolution]:
    """Sizes of the images, smallest first."""
    sizes = {comparison.job.resolution(place) for place in range(len(comparison.job.prompts))}
    return sorted(sizes, key=lambda size: (pixels(size), height_width(size)))


def _mean(estimate: Estimate) -> str:
    return f"{estimate.mean:.4g}" + ("" if estimate.high is None else f" ± {estimate.high - estimate.mean:.2g}")


def _difference(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.mean:+.4g}"
    return f"{estimate.mean:+.4g} [{estimate.low:+.4g}, {estimate.high:+.4g}]"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns every number of the comparison and the settings that produced it."""
    job, how = comparison.job, from_config(comparison.job.config).sampling
    sizes = sizes_of(comparison)
    scored = min(row.before.prompts for row in comparison.rows.values())
    return {
        "base": job.config.model.path,
        "trained_weights": str(job.trained_weights),
        "prompts": [prompt.text for prompt in job.prompts],
        "chosen": job.chosen,
        "scored": scored,
        "images_per_prompt": job.images_per_prompt,
        "seeds": list(job.seeds),
        # A single size is written as in the configuration, so [448, 576] is one height and width. Several sizes are
        # written as a list of (height, width).
        "resolution": sizes[0] if len(sizes) == 1 else [height_width(size) for size in sizes],
        "num_inference_steps": how.num_inference_steps,
        "true_cfg_scale": how.true_cfg_scale,
        "guidance_scale": how.guidance_scale,
        "rewards": {name: asdict(row) for name, row in comparison.rows.items()},
        "missing": list(comparison.missing),
    }


def picture(comparison: Comparison) -> Image.Image:
    """Draws the first images of the first prompts before and after, with their scores below."""
    places = sorted(comparison.before)
    sides = [("before", comparison.before), ("after", comparison.after)]
    columns = [(title, [images[place] for place in places]) for title, images in sides]
    captions = [[_captions(comparison, title, place) for place in places] for title, _ in sides]
    prompts = [comparison.job.prompts[place].text for place in places]
    return grid(prompts, columns, captions=captions)


def _captions(comparison: Comparison, side: str, place: int) -> list[list[str]]:
    """Returns, for each image, one line per score; the weighted sum is left out."""
    rows = [(name, row) for name, row in comparison.rows.items() if name != TOTAL][:_MAX_SCORES]
    scores = [(name, row.scores[side][place]) for name, row in rows if place in row.scores[side]]
    count = min(SHOWN_IMAGES, comparison.job.images_per_prompt)
    return [[f"{values[image]:.3g} {name}" for name, values in scores] for image in range(count)]


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes evaluation.json and before_after.png into `folder` and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).write_text(json.dumps(as_json(comparison), indent=2) + "\n")
    picture(comparison).save(folder / GRID, format="PNG", optimize=True)
    return [folder / RESULTS, folder / GRID]
