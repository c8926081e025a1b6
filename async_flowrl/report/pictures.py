"""The images of a run's evaluations for its report: file names by prompt, with the scores of each image."""

import base64
import json
from pathlib import Path
from typing import Any

from async_flowrl.observability.evaluations import DIVERSITY, Evaluation
from async_flowrl.observability.images import INDEX, caption
from async_flowrl.report.records import Records
from async_flowrl.report.series import chosen

# Most evaluations with pictures (the first, the last and evenly spaced ones), prompts of one, characters of a prompt.
MAX_EVALUATIONS = 40
MAX_PROMPTS = 64
MAX_PROMPT = 2_000
TYPES = {".png": "image/png", ".webp": "image/webp"}
# Largest file that is read.
MAX_BYTES = 64 * 2**20


def pictures_of(run: Records) -> dict[str, Any] | None:
    """The pictures of a run; None if it has none.

    `prompts` lists index (`place`) and text of each prompt, and the files of the images that it edits (`sources`).
    `evaluations` has the baseline first, then versions in rising order, each with version, folder and, per prompt,
    `files`, `scores` (curve → score per image) and `said` (extra texts of the rewards per image). `count` is the number
    of evaluations before thinning.
    """
    kept = [(e, index) for e in run.evaluations if (index := _index(run.root, e)) is not None]
    if not kept:
        return None
    texts: dict[int, str] = {}
    sources: dict[int, list[str]] = {}
    evaluations = []
    for evaluation, index in chosen(kept, MAX_EVALUATIONS):
        entries = [entry for entry in index["prompts"] if entry["files"]][:MAX_PROMPTS]
        texts |= {int(entry["place"]): str(entry["prompt"]) for entry in entries}
        sources |= {int(entry["place"]): entry.get("sources", []) for entry in entries}
        prompts = {str(entry["place"]): _prompt(entry, evaluation) for entry in entries}
        which = {"version": evaluation.version, "baseline": evaluation.baseline, "folder": folder_of(evaluation)}
        evaluations.append({**which, "prompts": prompts})
    return {
        "prompts": [
            {"place": place, "text": _short(texts[place]), "sources": sources[place]} for place in sorted(texts)
        ],
        "evaluations": evaluations,
        "count": len(kept),
    }


def folder_of(evaluation: Evaluation) -> str:
    return "baseline" if evaluation.baseline else f"step_{evaluation.version:06d}"


def _index(root: Path, evaluation: Evaluation) -> dict[str, Any] | None:
    path = root / "images" / folder_of(evaluation) / INDEX
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _prompt(entry: dict[str, Any], evaluation: Evaluation) -> dict[str, Any]:
    place, count = int(entry["place"]), len(entry["files"])
    scores = {
        name: list(curve.scores[place][:count])
        for name, curve in evaluation.curves.items()
        if curve.kind != DIVERSITY and place in curve.scores
    }
    texts = [caption(entry["extras"], image) for image in range(count)]
    return {"files": entry["files"], "scores": scores, **({"said": texts} if any(texts) else {})}


def _short(text: str) -> str:
    return text if len(text) <= MAX_PROMPT else f"{text[:MAX_PROMPT]}… ({len(text):,} characters)"


def data_uri(folder: Path, below: str) -> str | None:
    """The picture at the path `below` inside `folder` as a data URI; None if it does not exist or is refused."""
    # What lies outside of the folder, other file types and too large files are refused: the report must not show what
    # is elsewhere.
    path = folder / below
    kind = TYPES.get(path.suffix)
    try:
        inside = path.resolve(strict=True).is_relative_to(folder.resolve())
        if kind is None or not inside or not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    except (OSError, ValueError):
        return None
