"""Prompt files: txt (one prompt per line), jsonl and parquet (one prompt per row, with columns)."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from async_flowrl.config.messages import unknown_name
from async_flowrl.config.paths import find_data
from async_flowrl.config.schema import DataConfig
from async_flowrl.data.messages import PromptError, content_of, split_messages
from async_flowrl.types import Prompt, TokenIds

QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')
"""The first pair of double quotes, straight or curly, holds what should be written in the image."""
SPLITS = ("train", "evaluation")
COLUMNS = ("negative_prompt", "system_prompt", "target", "prompt_token_ids", "negative_token_ids")

Row = tuple[str, Mapping[str, Any]]
"""(where it stands: "file:line" or "file, row n"; the columns)."""


def load_prompts(config: DataConfig, *, split: str, needs_target: bool, base: Path | None = None) -> list[Prompt]:
    """The prompts of `split` ("train" or "evaluation"), indexed in file order.

    `needs_target`: refuse prompts that name no target (a `target` column, or the first pair of double quotes).
    Relative paths are looked up in `base` (the working directory), then among the shipped files.
    Raises FileNotFoundError or PromptError, one sentence each.
    """
    if split not in SPLITS:
        raise ValueError(unknown_name("split", split, SPLITS))
    key = "train" if split == "train" or config.evaluation is None else "evaluation"
    given = config.train if config.evaluation is None or key == "train" else config.evaluation
    path = find_data(given, base, key=f"data.{key}")
    if path.suffix not in READERS:
        raise PromptError(unknown_name(f"the ending of data.{split} ({path})", path.suffix, READERS))
    prompts = [
        _prompt(index, where, columns, config.prompt_key, needs_target=needs_target)
        for index, (where, columns) in enumerate(READERS[path.suffix](path, config.prompt_key))
    ]
    if not prompts:
        raise PromptError(f"{path} holds no prompts")
    return prompts


def quoted_target(text: str) -> str | None:
    """What stands in the first pair of double quotes, without surrounding blanks; None if there is nothing."""
    match = QUOTED.search(text)
    return ((match[1] or match[2] or "").strip() or None) if match else None


def _prompt(index: int, where: str, columns: Mapping[str, Any], key: str, *, needs_target: bool) -> Prompt:
    if key not in columns:
        raise PromptError(f"{where}: {unknown_name('data.prompt_key', key, columns)}")
    written, system = split_messages(columns[key], where)
    text = written.strip()
    if not text:
        raise PromptError(f"{where}: the prompt is empty")
    target = _optional(columns, "target", where) or _ground_truth(columns) or quoted_target(text)
    if needs_target and not target:
        raise PromptError(f"{where}: the reward needs a target, but there is none in double quotes: {text!r}")
    return Prompt(
        index=index,
        text=text,
        negative=_optional(columns, "negative_prompt", where),
        system=_optional(columns, "system_prompt", where) or system,
        target=target,
        metadata={name: value for name, value in columns.items() if name not in (key, *COLUMNS)},
        token_ids=_token_ids(columns, "prompt_token_ids", where),
        negative_token_ids=_token_ids(columns, "negative_token_ids", where),
    )


def _optional(columns: Mapping[str, Any], name: str, where: str) -> str | None:
    value = columns.get(name)
    return None if value is None else content_of(value, f"{where}: {name}")


def _token_ids(columns: Mapping[str, Any], name: str, where: str) -> TokenIds | None:
    """The ids that a tokenizer made of the prompt in the model's template; an integer is never a bool here."""
    value = columns.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise PromptError(f"{where}: {name} must be a list of at least one token id, got {value!r:.80}")
    for index, number in enumerate(value):
        if type(number) is not int or number < 0:
            raise PromptError(f"{where}: {name} must hold integers from 0 on, got {number!r} at position {index}")
    return tuple(value)


def _ground_truth(columns: Mapping[str, Any]) -> str | None:
    """verl keeps the target in reward_model.ground_truth."""
    model = columns.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    return truth if isinstance(truth, str) and truth.strip() else None


def _read_txt(path: Path, key: str) -> Iterator[Row]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", {key: line.strip()}


def _read_jsonl(path: Path, key: str) -> Iterator[Row]:
    del key
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise PromptError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        yield f"{path}:{number}", row


def _read_parquet(path: Path, key: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise PromptError(f"{path} is not a parquet file: {error}") from error
    if key not in table.column_names:
        raise PromptError(f"{path}: {unknown_name('data.prompt_key', key, table.column_names)}")
    for number, row in enumerate(table.to_pylist()):
        yield f"{path}, row {number}", row


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text: {error}") from error


READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
