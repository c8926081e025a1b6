"""python -m benchmarks.gpu_first_hour.peak OUT [words of `train`]: a run in this process, then its peak of memory."""

import json
import sys
from pathlib import Path

import torch

from async_flowrl.main import main

if __name__ == "__main__":
    out = sys.argv.pop(1)
    code = main()
    if torch.cuda.is_available():
        taken = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        Path(out).write_text(json.dumps({name: size / 2**30 for name, size in taken.items()}))
    sys.exit(code)
