"""Writes train.parquet and test.parquet for the OCR reward: columns prompt, target, system_prompt, negative_prompt.

python examples/ocr/write_parquet.py --out data/ocr
python -m async_flowrl.main reward=ocr data.train=data/ocr/train.parquet data.evaluation=data/ocr/test.parquet
"""

import argparse
from pathlib import Path

import pyarrow
import pyarrow.parquet

from async_flowrl.config.schema import DataConfig
from async_flowrl.data.load import load_data

SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)
"""Qwen-Image's own system prompt; another one changes every prompt embedding."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompt lists with quoted targets → train.parquet and test.parquet")
    parser.add_argument("--out", type=Path, default=Path("data/ocr"), help="folder to write to")
    parser.add_argument("--train", default="prompts/ocr_train.txt", help="txt, jsonl or parquet")
    parser.add_argument("--test", default="prompts/ocr_test.txt", help="txt, jsonl or parquet")
    parser.add_argument("--system", default=SYSTEM, help="system prompt")
    parser.add_argument("--negative", default=" ", help="negative prompt; used where rollout.true_cfg_scale > 1")
    arguments = parser.parse_args()
    try:
        for split, source in (("train", arguments.train), ("test", arguments.test)):
            path, count = write(arguments.out / f"{split}.parquet", source, arguments.system, arguments.negative)
            print(f"{path}: {count} prompts")
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


def write(path: Path, source: str, system: str, negative: str) -> tuple[Path, int]:
    """Writes one split; returns its path and the number of prompts.

    `system` and `negative` fill the prompts that bring none. Raises ValueError, with file and line, for a prompt
    without a quoted target, and FileNotFoundError if `source` does not exist.
    """
    prompts = load_data(DataConfig(train=source, held_out=0), needs_target=True).train
    rows = [
        {
            "prompt": prompt.text,
            "target": prompt.target,
            "system_prompt": prompt.system or system,
            "negative_prompt": prompt.negative if prompt.negative is not None else negative,
        }
        for prompt in prompts
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path, len(rows)


if __name__ == "__main__":
    main()
