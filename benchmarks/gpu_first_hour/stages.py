"""The stages of the first hour in their order, with the limit of each and the call in which it runs."""

from dataclasses import dataclass

CALL_SECONDS = 590
"""The longest that all stages of one call may take together."""
HOUR_SECONDS = 1500
"""The longest that all stages may take together."""


@dataclass(frozen=True)
class Stage:
    """One stage. `place` is `module:function`, `seconds` its limit, `call` the call (1, 2, 3) that it belongs to."""

    place: str
    seconds: int
    call: int
    what: str


HERE = "benchmarks.gpu_first_hour"
STAGES = {
    "kernels": Stage(f"{HERE}.kernels:kernels", 80, 1, "one kernel of each kind gives the same bits again"),
    "tiny": Stage(f"{HERE}.runs:tiny", 140, 1, "digests of the tiny job: seeds, placements, dtypes, families"),
    "full": Stage(f"{HERE}.full_size:full", 190, 1, "Qwen-Image at full size: speed, MFU, peak against plan"),
    "tests": Stage(f"{HERE}.runs:gpu_tests", 150, 1, "tests/gpu"),
    "one_card": Stage(f"{HERE}.one_card:one_card", 200, 2, "NCCL and pynccl between processes on one card"),
    "glyphs": Stage(f"{HERE}.runs:glyphs", 190, 2, "a small model learns to write: held-out OCR of at least 0.8"),
    "probe": Stage(f"{HERE}.probe:probe", 130, 2, "ceilings, attention, torch.compile and CUDA graphs of a block"),
    "whole": Stage(f"{HERE}.runs:whole", 220, 3, "two whole runs at full size end with one digest"),
    "compiled": Stage(f"{HERE}.full_size:compiled", 200, 3, "`full` with compiled blocks"),
}
"""Name → stage, in the order in which they run."""
