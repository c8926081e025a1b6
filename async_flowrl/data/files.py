"""Finds the file of a split (train or evaluation) in a folder laid out as by flow_grpo, verl or Hugging Face."""

import json
from pathlib import Path

from async_flowrl.config.messages import first_line
from async_flowrl.data.messages import PromptError
from async_flowrl.types import EVALUATION, TRAIN

NAMES = {TRAIN: ("train",), EVALUATION: ("test", "validation", "val", "evaluation")}
"""Split → its names in files and datasets; the first name that is found is used."""
PATTERNS = ("{}.txt", "{}.jsonl", "{}_metadata.jsonl", "{}.parquet", "{}-*-of-*.parquet", "data/{}-*-of-*.parquet")


def split_files(path: Path, split: str) -> list[Path] | None:
    """Returns the files of `split` (parts of one table) or the folder of its dataset; None if there is none.

    A path that is a file, or a folder written by `save_to_disk` for one split, is returned as it is. Raises PromptError
    if several files match the split.
    """
    if not path.is_dir():
        return [path]
    if (path / "state.json").is_file():
        return [path]
    for name in NAMES[split]:
        if name in _datasets(path):
            return [path / name]
        by_pattern = {pattern: files for pattern in PATTERNS if (files := sorted(path.glob(pattern.format(name))))}
        if len(by_pattern) > 1:
            several = ", ".join(file.name for files in by_pattern.values() for file in files)
            raise PromptError(f"{path} has several files of the split {name!r} ({several}): give the one you mean")
        if by_pattern:
            return next(iter(by_pattern.values()))
    return None


def no_split(path: Path, split: str) -> PromptError:
    """Returns the error for a folder in which `split_files` found nothing."""
    known = ", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "nothing"
    wanted = " or ".join(NAMES[split])
    return PromptError(f"{path} holds no split {wanted} as txt, jsonl, parquet or Arrow dataset; it has {known}")


def _datasets(folder: Path) -> list[str]:
    """Returns the splits of a folder that `DatasetDict.save_to_disk` wrote; empty for any other folder."""
    described = folder / "dataset_dict.json"
    if not described.is_file():
        return []
    try:
        return [str(name) for name in json.loads(described.read_text(encoding="utf-8"))["splits"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PromptError(f"{described} cannot be read: {first_line(error)}") from error
