"""Files of prompts, and the prompts that are loaded from them."""

import json
from pathlib import Path
from typing import Any

from async_flowrl.config.schema import DataConfig
from async_flowrl.data.load import Data, load_data


def load(train: Path | str, **settings: Any) -> Data:
    return load_data(DataConfig(train=str(train), **settings), needs_target=False)


def texts(prompts: Any) -> list[str]:
    return [prompt.text for prompt in prompts]


def lines(path: Path, *prompts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{prompt}\n" for prompt in prompts), encoding="utf-8")
    return path


def rows(path: Path, *columns: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in columns), encoding="utf-8")
    return path
