"""python benchmarks/prompts.py FILE: seconds and memory until a run knows its prompts, and to look some up."""

import sys
import time
from pathlib import Path

from async_flowrl.config.schema import DataConfig
from async_flowrl.data.load import load_data
from async_flowrl.data.sampler import Sampler

STEPS, PROMPTS_PER_STEP = 50, 8


def resident() -> tuple[float, float]:
    """MB that this process has in use: its own, and pages of mapped files, which the kernel takes back when it needs
    them."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssFile:")}
    return kib["RssAnon:"] * 1024 / 1e6, kib["RssFile:"] * 1024 / 1e6


def main() -> None:
    (own, mapped), began = resident(), time.process_time()
    data = load_data(DataConfig(train=sys.argv[1], held_out=0.01), needs_target=False)
    seconds, (own_now, mapped_now) = time.process_time() - began, resident()
    print(
        f"{len(data.train):,} training and {len(data.evaluation):,} held-out prompts of "
        f"{Path(sys.argv[1]).stat().st_size / 1e6:.0f} MB: {seconds:.1f} s of CPU, {own_now - own:.0f} MB, and "
        f"{mapped_now - mapped:.0f} MB of mapped files"
    )
    sampler, began = Sampler(len(data.train), PROMPTS_PER_STEP, seed=0, shuffle=True), time.process_time()
    for step in range(STEPS):
        for index in sampler.step(step * 100):
            assert data.train[index].index == index
    print(f"{STEPS * PROMPTS_PER_STEP} prompts of {STEPS} steps: {time.process_time() - began:.2f} s of CPU")


if __name__ == "__main__":
    main()
