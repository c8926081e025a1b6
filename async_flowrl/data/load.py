"""Loading of a run's prompts: which prompts are trained, which are evaluated, and from which files they come.

Held-out prompts are evaluated and never trained. Which these are depends only on a hash of the prompt's text and a
seed. Duplicates are therefore on the same side, and with `held_out` a prompt stays on its side when the file grows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from async_flowrl.config.paths import find_data
from async_flowrl.config.schema import DataConfig
from async_flowrl.data import condition_images
from async_flowrl.data.prompts import Keys, PromptError
from async_flowrl.data.rows import NAMES, Rows, TableRows, open_rows, split_files
from async_flowrl.data.store import Prompts, Scan, TextKeys, scan
from async_flowrl.seeds import derive
from async_flowrl.types import EVALUATION, TRAIN, Prompt

# Fewest distinct prompts with which some are held out by default.
MIN_DISTINCT = 64
# Most distinct prompts that are held out by default, and at most one in MIN_PROMPTS_PER_HELD_OUT.
MAX_DEFAULT_HELD_OUT = 16
MIN_PROMPTS_PER_HELD_OUT = 8
Check = Callable[[Prompt], None]


class Data(NamedTuple):
    """The prompts of a run; `chosen` says in words how the evaluated ones were chosen."""

    train: Prompts
    evaluation: Prompts
    chosen: str


def load_data(config: DataConfig, *, needs_target: bool, check: Check | None = None) -> Data:
    """Returns the training and the evaluation prompts of `data.*`, in file order. Raises FileNotFoundError or
    PromptError.

    `needs_target` refuses prompts without a target; `check` refuses further ones of data.train by a ValueError.
    """
    keys = Keys(config.prompt_key, config.weight_key, needs_target, config.images)
    if config.held_out and config.evaluation is not None:
        raise PromptError(
            f"data.held_out={config.held_out:g} takes the prompts of evaluations from data.train, but data.evaluation="
            f"{config.evaluation} gives them, too: leave one of them out"
        )
    path = find_data(config.train, key="data.train", folder=True)
    source = scanned(open_split(path, TRAIN, keys), keys, check)
    keys = Keys(config.prompt_key, None, needs_target, config.images)
    if (rows := evaluation_rows(config, path, keys)) is not None:
        data = Data(Prompts(source), Prompts(scanned(rows, keys)), f"of {rows.path}")
    else:
        data = divided(config, source)
    if data.train.weights is not None and not data.train.weights.any():
        raise PromptError(f"{path}: all weights of training prompts in {config.weight_key} are 0")
    return data


def open_split(path: Path, split: str, keys: Keys) -> Rows:
    files = split_files(path, split)
    if files is None:
        names, entries = " or ".join(NAMES[split]), ", ".join(sorted(entry.name for entry in path.iterdir())[:10])
        raise PromptError(
            f"{path} holds no split {names} as txt, jsonl, parquet or Arrow dataset; it has {entries or 'nothing'}"
        )
    if keys.weight and files[0].suffix == ".txt":
        raise PromptError(f"data.weight_key={keys.weight}: {files[0]} has no columns, use jsonl or parquet")
    images = condition_images.COLUMNS if keys.images else ()
    return open_rows(files[0], keys.prompt, images) if len(files) == 1 else TableRows(path, files, keys.prompt, images)


def scanned(rows: Rows, keys: Keys, check: Check | None = None) -> Scan:
    """Reads all rows once. Raises PromptError for the first row that is refused, or if there is no prompt."""
    result = scan(rows, keys, check=check)
    if not len(result.places):
        raise PromptError(f"{rows.path} holds no prompts")
    return result


def evaluation_rows(config: DataConfig, train: Path, keys: Keys) -> Rows | None:
    """Returns the rows of data.evaluation, or of the test split of the folder `train`; None if there are none."""
    if config.evaluation is not None:
        path = find_data(config.evaluation, key="data.evaluation", folder=True)
        return open_split(path, EVALUATION, keys)
    if config.held_out or not train.is_dir() or (train / "state.json").is_file():
        return None
    return open_split(train, EVALUATION, keys) if split_files(train, EVALUATION) else None


def divided(config: DataConfig, source: Scan) -> Data:
    """Holds out (evaluates, never trains) a part of one file, or trains and evaluates all of it. Raises PromptError."""
    share = config.held_out
    if share is None:
        out = held_out_by_default(source.texts, config.held_out_seed)
        how = "of the same file by default (data.evaluation and data.held_out are null)"
    else:
        out = held_out(source.texts, share, config.held_out_seed) if share else None
        how = f"of the same file by data.held_out={share:g}"
    if out is None:
        prompts = Prompts(source)
        return Data(prompts, prompts, "the training prompts: none are held out")
    if not out.any() or out.all():
        missing = "none to train on" if out.any() else "none to evaluate"
        raise PromptError(
            f"data.held_out={share:g} of the {len(out)} prompts of {source.rows.path} leaves {missing}: choose another "
            "share, or another data.held_out_seed"
        )
    return Data(Prompts(source, ~out), Prompts(source, out), how)


def held_out(texts: TextKeys, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Returns [prompts] True for prompts that are held out, if `share` (0..1) of all texts are."""
    return _numbers(texts, seed).astype(np.float64) < share * 2.0**64


def held_out_by_default(texts: TextKeys, seed: int) -> npt.NDArray[np.bool_] | None:
    """Returns [prompts] True for prompts held out by default; None if there are fewer than MIN_DISTINCT texts."""
    numbers = _numbers(texts, seed)
    distinct = np.unique(numbers)
    if len(distinct) < MIN_DISTINCT:
        return None
    return np.asarray(numbers < distinct[min(MAX_DEFAULT_HELD_OUT, len(distinct) // MIN_PROMPTS_PER_HELD_OUT)])


def _numbers(texts: TextKeys, seed: int) -> TextKeys:
    """Returns evenly distributed hashes: splitmix64's last step (Steele, Lea and Flood 2014) of text and seed."""
    z = texts ^ np.uint64(derive(seed, "held_out"))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
