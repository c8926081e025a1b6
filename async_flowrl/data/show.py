"""The page of `async-flowrl data`: text that shows how a run reads a prompt file."""

from dataclasses import dataclass
from typing import Any

from async_flowrl.config.resolution import in_pixels, in_words, pixels
from async_flowrl.data.prompts import COLUMNS, SIZES, Keys
from async_flowrl.data.rows import LineRows
from async_flowrl.data.store import MAX_KEPT_REFUSALS, Prompts, Scan, Weights

ROWS_SHOWN = 3
SIZES_SHOWN = 8
MAX_SHOWN = 400
"""Largest number of characters shown of one value."""
FIELDS = {"negative_prompt": "negative prompt", "system_prompt": "system prompt", "target": "target"} | dict.fromkeys(
    SIZES, "the size of its images"
)


@dataclass(frozen=True)
class Shown:
    """A scanned prompt file, and its division into training and evaluation prompts."""

    scan: Scan
    train: Prompts
    evaluation: Prompts | None
    """Prompts of the same file that would be held out; None if there are none."""
    chosen: str = ""
    """Source of the evaluation prompts, in words."""


def page(shown: Shown) -> str:
    """Returns the page: layout, counts, columns, the first rows, and the refused rows with their places."""
    scan = shown.scan
    lines = [
        ("file", str(scan.rows.path)),
        ("layout", layout(scan)),
        ("prompts", _counts(shown)),
        ("longest", f"{scan.longest:,} characters, {scan.rows.where(scan.longest_row)}") if scan.longest else None,
        ("sizes", sizes(scan)) if scan.sizes else None,
        ("weights", _weights(shown.train.weights)) if shown.train.weights is not None and len(shown.train) else None,
    ]
    parts = ["\n".join(f"{name:10} {text}" for name, text in filter(None, lines))]
    parts.append("\n".join(["columns", *(f"  {row}" for row in columns(scan))]))
    rows = [text for index in range(min(ROWS_SHOWN, len(shown.train))) for text in _row(shown.train, index)]
    parts.append("\n".join([f"the first {min(ROWS_SHOWN, len(shown.train))} of those trained", *rows]))
    parts.append("\n".join(_refused(scan)))
    return "\n\n".join(parts) + "\n"


def sizes(scan: Scan) -> str:
    """Returns the image sizes that prompts set themselves, in words."""
    some = sorted(scan.sizes, key=pixels)
    shown = ", ".join(in_words(each) for each in some[:SIZES_SHOWN])
    more = f" … and {len(some) - SIZES_SHOWN:,} more" if len(some) > SIZES_SHOWN else ""
    rest = len(scan.places) - scan.sized
    others = f"; rollout.resolution says that of the other {rest:,}" if rest else ""
    return f"{shown}{more} px (height × width) by {scan.sized:,} prompts themselves{others}"


def layout(scan: Scan) -> str:
    """Returns the file format in words, and the project that writes such files if it is recognised."""
    known, count = scan.columns, len(scan.places)
    if isinstance(scan.rows, LineRows) and scan.rows.path.suffix == ".txt":
        quoted = "; target between the first pair of double quotes"
        if scan.targets and scan.targets == count:
            return f"txt, one prompt per line{quoted} (flow_grpo's OCR)"
        some = f"{quoted} in {scan.targets:,} of them" if scan.targets else " (flow_grpo's PickScore)"
        return f"txt, one prompt per line{some}"
    form = "jsonl, one object per line" if isinstance(scan.rows, LineRows) else "table, one prompt per row"
    if {"tag", "include"} <= known.keys():
        return f"{form} (GenEval: tag, include, exclude, …)"
    if "reward_model" in known:
        return f"{form} (verl: chat messages, reward_model.ground_truth, …)"
    return form


def columns(scan: Scan) -> list[str]:
    """Returns one line per column: its name, its use, and the number of rows that have it."""
    total = len(scan.rows)
    lines = []
    for name, count in scan.columns.items():
        share = "" if count == total else f" (in {count:,} of {total:,} rows)"
        lines.append(f"{name} → {_goes(name, scan.keys)}{share}")
    return lines + [f"{name} → left out, as it holds bytes" for name in scan.rows.left_out]


def _goes(name: str, keys: Keys) -> str:
    if name == keys.prompt:
        return "the prompt"
    if name == keys.weight:
        return "the weight"
    if name in COLUMNS:
        return FIELDS.get(name, f"{name.removesuffix('_token_ids').replace('_', ' ')}'s token ids")
    return "target (ground_truth) and metadata" if name == "reward_model" else "metadata, for the reward"


def _counts(shown: Shown) -> str:
    scan, parts = shown.scan, []
    whole = Prompts(scan)
    duplicates = f", {whole.duplicates:,} of them duplicates by their text" if whole.duplicates else ""
    parts.append(f"{len(whole):,} of {len(scan.rows):,} rows can be read{duplicates}")
    if shown.evaluation is not None:
        parts.append(f"{len(shown.train):,} would be trained, {len(shown.evaluation):,} held out, {shown.chosen}")
    elif shown.chosen:
        parts.append(f"all would be trained, and evaluations use those {shown.chosen}")
    with_target = f"{scan.targets:,} have a target"
    return "; ".join([*parts, with_target])


def _weights(weights: Weights) -> str:
    zero = int((weights == 0).sum())
    never = f"; {zero:,} of them 0, which is never drawn" if zero else ""
    return f"{weights.min():g} to {weights.max():g}, {weights.mean():.4g} on average{never}"


def _row(prompts: Prompts, index: int) -> list[str]:
    prompt = prompts[index]
    said: dict[str, Any] = {
        "prompt": prompt.text,
        "target": prompt.target,
        "negative": prompt.negative,
        "system": prompt.system,
        "size": prompt.resolution and in_pixels(prompt.resolution),
        "token ids": prompt.token_ids and f"{len(prompt.token_ids)} ids",
        "metadata": dict(prompt.metadata) or None,
    }
    lines = [f"    {name}: {_short(value)}" for name, value in said.items() if value is not None]
    return [f"  {prompts.where(index)}", *lines]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _refused(scan: Scan) -> list[str]:
    if not scan.refusals:
        return ["refused    nothing"]
    lines = [f"refused    {scan.refusals:,} rows, and with them a run on this file"]
    lines += [f"  {refusal}" for refusal in scan.refused]
    more = scan.refusals - MAX_KEPT_REFUSALS
    return lines + ([f"  … and {more:,} more"] if more > 0 else [])
