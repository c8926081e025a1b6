"""A million rows of verl-omni's parquet layout are read in little memory."""

import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

ROWS, PART = 1_000_000, 50_000
BOUND_MB = 150
SYSTEM = "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships:"
PROGRAM = """
import sys, threading, time
from pathlib import Path
import numpy, pyarrow
from async_flowrl.config.schema import DataConfig
from async_flowrl.data.load import load_data

def own():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024 / 1e6

before, peaks = own(), [0.0]
def watch():
    while True:
        peaks.append(max(peaks.pop(), own()))
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
data = load_data(DataConfig(train=sys.argv[1], held_out=0.01), needs_target=True)
print(len(data.train) + len(data.evaluation), max(peaks[-1], own()) - before)
"""


def part(start: int) -> pyarrow.Table:
    return pyarrow.Table.from_pylist(
        [
            {
                "data_source": "flow_grpo/ocr",
                "prompt": [
                    {"role": "system", "content": SYSTEM},
                    {
                        "role": "user",
                        "content": f'photo {n} of a sign in the street: "Text {n}", by night',
                    },
                ],
                "negative_prompt": [{"role": "user", "content": " "}],
                "ability": "ocr",
                "reward_model": {"style": "model", "ground_truth": f"Text {n}"},
                "extra_info": {"split": "train", "index": n, "raw_prompt": f"photo number {n}"},
            }
            for n in range(start, start + PART)
        ]
    )


@pytest.mark.slow
def test_a_million_rows_of_verl_omnis_parquet_take_little_memory(tmp_path: Path) -> None:
    first = part(0)
    with pyarrow.parquet.ParquetWriter(tmp_path / "train.parquet", first.schema) as writer:
        writer.write_table(first)
        for start in range(PART, ROWS, PART):
            writer.write_table(part(start))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "train.parquet")]
    count, peak = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500).stdout.split()
    assert int(count) == ROWS and float(peak) < BOUND_MB, peak
