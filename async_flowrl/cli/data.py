"""The command `async-flowrl data FILE`: shows how a run reads a prompt file, and which rows it refuses."""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from async_flowrl.cli.options import of_option, seed
from async_flowrl.config import exit_codes
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.error_text import shortened
from async_flowrl.config.paths import config_dir, find_data
from async_flowrl.config.resolution import in_pixels, in_words, pixels
from async_flowrl.config.schema import DataConfig, ModelConfig, RewardConfig, RewardTerm
from async_flowrl.data import condition_images
from async_flowrl.data.load import divided, evaluation_rows, open_split
from async_flowrl.data.prompts import COLUMNS, Keys
from async_flowrl.data.store import MAX_KEPT_REFUSALS, Prompts, Scan, Weights, scan
from async_flowrl.observability.terminal import refuse
from async_flowrl.policies.registry import PromptCheck, resolve_model, shapes_of
from async_flowrl.rewards.registry import check_rewards, prompt_check
from async_flowrl.types import EVALUATION, TRAIN, Prompt

ROWS_SHOWN = 3
SIZES_SHOWN = 8
MAX_SHOWN = 400  # Largest number of characters shown of one value.


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="async-flowrl data", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="txt, jsonl, parquet, or a folder with splits")
    parser.add_argument("--split", choices=(TRAIN, EVALUATION), default=TRAIN, help="of a folder (default: train)")
    parser.add_argument("--prompt-key", default="prompt", help="data.prompt_key: the column of the prompt")
    parser.add_argument("--weight-key", help="data.weight_key: the column of the weight")
    parser.add_argument("--no-images", action="store_true", help="data.images=false: leave image and images to rewards")
    parser.add_argument("--held-out", type=float, help="data.held_out: share that is evaluated instead of trained")
    parser.add_argument("--held-out-seed", type=seed, default=0, help="data.held_out_seed")
    parser.add_argument("--reward", help="of configs/reward/, or file.py:attr: refuse what it could not score")
    parser.add_argument("--model", help="of configs/model/, or a path: count prompts that it cuts, refuse sizes")
    options = parser.parse_args(arguments)
    try:
        if options.held_out is not None and not 0 <= options.held_out < 1:
            raise ConfigError(f"--held-out must be at least 0 and below 1, got {options.held_out:g}")
        model = resolve_model(model_named(options.model)) if options.model else None
        reward = reward_named(options.reward) if options.reward else RewardConfig()
        needs_target = bool(options.reward) and check_rewards(reward)
        checks: list[Callable[[Prompt], object] | None] = [prompt_check(reward)]
        lengths = None
        if model is not None:
            targets = not options.reward or needs_target or checks[0] is not None
            lengths, shapes = PromptCheck(model, targets=targets), functools.cache(partial(shapes_of, model))
            checks += [lengths, lambda prompt: prompt.resolution and shapes(prompt.resolution)]
        keys = Keys(options.prompt_key, options.weight_key, needs_target, not options.no_images)
        scanned, train, evaluation = look(options, keys, [check for check in checks if check is not None])
    except (ValueError, FileNotFoundError) as error:
        return refuse(of_option(error, "--model", options.model))
    sys.stdout.write(page(scanned, train, evaluation, lengths.cut if lengths else None))
    return exit_codes.CONFIG if scanned.refusals or not len(scanned.places) else exit_codes.OK


def model_named(name: str) -> ModelConfig:
    if (config_dir() / "model" / f"{name}.yaml").is_file():
        return compose_config(overrides=[f"model={name}"]).model
    return ModelConfig(path=name)


def reward_named(name: str) -> RewardConfig:
    if ":" in name:
        return RewardConfig(terms={name.rpartition(":")[2]: RewardTerm(name=name)})
    return compose_config(overrides=[f"reward={name}"]).reward


def look(
    options: argparse.Namespace, keys: Keys, checks: Sequence[Callable[[Prompt], Any]]
) -> tuple[Scan, Prompts, str]:
    """Reads the whole file, with its refused rows, which `checks` raise. ValueError if it cannot be read."""
    path = find_data(options.file, key="FILE", folder=True)
    rows = open_split(path, options.split, keys)

    def check(prompt: Prompt) -> None:
        for test in checks:
            test(prompt)

    scanned = scan(rows, keys, keep_refusals=True, check=check)
    if options.split == EVALUATION or not len(scanned.places):
        return scanned, Prompts(scanned), ""
    settings = DataConfig(held_out=options.held_out, held_out_seed=options.held_out_seed)
    if (other := evaluation_rows(settings, path, keys)) is not None:
        return scanned, Prompts(scanned), f"all would be trained, and evaluations use those of {other.path}"
    data = divided(settings, scanned)
    if data.evaluation is data.train:
        return scanned, data.train, ""
    held_out = f"{len(data.train):,} would be trained, {len(data.evaluation):,} held out, {data.chosen}"
    return scanned, data.train, held_out


def page(scan: Scan, train: Prompts, evaluation: str, cut: int | None = None) -> str:
    """The page; `cut` is the number of prompts of which the text encoder reads only a part, None without a model."""
    lines = [
        ("file", str(scan.rows.path)),
        ("prompts", _counts(scan, evaluation)),
        ("longest", f"{scan.longest:,} characters, {scan.rows.where(scan.longest_row)}") if scan.longest else None,
        ("cut", f"{cut:,} prompts are longer than the text encoder reads") if cut is not None else None,
        ("sizes", _sizes(scan)) if scan.sizes else None,
        ("images", _images(scan)) if scan.image_sizes else None,
        ("weights", _weights(train.weights)) if train.weights is not None and len(train) else None,
    ]
    parts = ["\n".join(f"{name:10} {text}" for name, text in filter(None, lines))]
    parts.append("\n".join(["columns", *(f"  {row}" for row in columns(scan))]))
    rows = [text for index in range(min(ROWS_SHOWN, len(train))) for text in _row(train, index)]
    parts.append("\n".join([f"the first {min(ROWS_SHOWN, len(train))} of those trained", *rows]))
    parts.append("\n".join(_refused(scan)))
    return "\n\n".join(parts) + "\n"


def columns(scan: Scan) -> list[str]:
    images = condition_images.COLUMNS if scan.keys.images else ()
    uses = {scan.keys.prompt: "the prompt", scan.keys.weight: "the weight"}
    uses |= dict.fromkeys((*COLUMNS, *images), "read as such")
    lines = [
        f"{name} → {uses.get(name, 'metadata, for the reward')}, in {count:,} of {len(scan.rows):,} rows"
        for name, count in scan.columns.items()
    ]
    return lines + [f"{name} → left out, as it holds bytes" for name in scan.rows.left_out]


def _counts(scan: Scan, evaluation: str) -> str:
    whole = Prompts(scan)
    read = f"{len(whole):,} of {len(scan.rows):,} rows can be read, {whole.duplicates:,} of them duplicates by text"
    return "; ".join(filter(None, (read, evaluation, f"{scan.targets:,} have a target")))


def _weights(weights: Weights) -> str:
    return f"{weights.min():g} to {weights.max():g}, {weights.mean():.4g} on average"


def _sizes(scan: Scan) -> str:
    listed = ", ".join(in_words(size) for size in sorted(scan.sizes, key=pixels)[:SIZES_SHOWN])
    return f"{len(scan.sizes):,} (height × width) by {scan.sized:,} prompts themselves: {listed}"


def _images(scan: Scan) -> str:
    counts, sizes = sorted(scan.imaged), sorted(scan.image_sizes, key=lambda size: (pixels(size), size))
    each = f"{counts[0]} to {counts[-1]}" if counts[1:] else str(counts[0])
    of = f"{in_words(sizes[0])} to {in_words(sizes[-1])}"
    return f"{scan.image_sizes.total():,} to edit, {each} per prompt, of {of} px"


def _row(prompts: Prompts, index: int) -> list[str]:
    prompt = prompts[index]
    values: dict[str, Any] = {
        "prompt": prompt.text,
        "target": prompt.target,
        "negative": prompt.negative,
        "system": prompt.system,
        "size": prompt.resolution and in_pixels(prompt.resolution),
        "images": ", ".join(f"{image.path} ({in_pixels(image.size)})" for image in prompt.images) or None,
        "token ids": prompt.token_ids and f"{len(prompt.token_ids)} ids",
        "metadata": dict(prompt.metadata) or None,
    }
    lines = [f"    {name}: {shortened(repr(value), MAX_SHOWN)}" for name, value in values.items() if value is not None]
    return [f"  {prompts.where(index)}", *lines]


def _refused(scan: Scan) -> list[str]:
    if not scan.refusals:
        return ["refused    nothing" if len(scan.places) else "refused    the file, which holds no prompts"]
    lines = [f"refused    {scan.refusals:,} rows, and with them a run on this file"]
    lines += [f"  {refusal}" for refusal in scan.refused]
    more = scan.refusals - MAX_KEPT_REFUSALS
    return lines + ([f"  … and {more:,} more"] if more > 0 else [])
