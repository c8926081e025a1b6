"""What the prompts of a file cost a run: memory, CPU, and padding in batches of tickets.

    python -m benchmarks.prompt_files FILE [--tokenizer FOLDER] [--prompts-per-step 16] [--steps 50]

It says seconds and memory until a run knows the prompts, seconds to look some up, and the share of padding among the
text positions of batches of tickets, by the order in which batches take prompts. Without --tokenizer a token is a word
or a punctuation mark.
"""

import argparse
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from async_flowrl.config.schema import DataConfig
from async_flowrl.data.load import load_data
from async_flowrl.data.sampler import Sampler
from async_flowrl.tickets.request import by_length
from async_flowrl.types import Prompt
from benchmarks.markdown_tables import markdown_table

SIZES = 2, 4, 8
"""Tickets of a batch."""


def resident() -> tuple[float, float]:
    """MB that this process has in use: its own, and pages of mapped files, which the kernel takes back when it needs
    them."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssFile:")}
    return kib["RssAnon:"] * 1024 / 1e6, kib["RssFile:"] * 1024 / 1e6


def loaded(file: Path, per_step: int, steps: int) -> Sequence[Prompt]:
    """Loads the prompts and looks some up; prints what that took, and returns them."""
    (own, mapped), began = resident(), time.process_time()
    data = load_data(DataConfig(train=str(file), held_out=0), needs_target=False).train
    seconds, (own_now, mapped_now) = time.process_time() - began, resident()
    print(
        f"{len(data):,} prompts of {file.stat().st_size / 1e6:.0f} MB: {seconds:.1f} s of CPU, {own_now - own:.0f} MB, "
        f"and {mapped_now - mapped:.0f} MB of mapped files"
    )
    sampler, began = Sampler(len(data), per_step, seed=0, shuffle=True), time.process_time()
    for step in range(steps):
        assert all(data[index].index == index for index in sampler.step(step * 100))
    print(f"{steps * per_step} prompts of {steps} steps: {time.process_time() - began:.2f} s of CPU")
    return data


def padded(lengths: Sequence[int], order: Sequence[int], size: int) -> tuple[int, int]:
    """Returns (positions of padding, all positions) of a step whose prompts have `lengths` tokens, in that order."""
    batches = [[lengths[place] for place in order[start : start + size]] for start in range(0, len(order), size)]
    every = sum(max(batch) * len(batch) for batch in batches)
    return every - sum(lengths), every


def share(prompts: Sequence[str], tokens: Callable[[str], int], per_step: int, steps: int, size: int) -> list[float]:
    """Returns the share of padding in batches of `size` tickets of whole groups.

    The batches are those by number, by the bytes of the prompts as in a run, and by their tokens, which is the least.
    """
    sampler, found = Sampler(len(prompts), per_step, seed=0, shuffle=True), [[0, 0] for _ in range(3)]
    counts = [tokens(prompt) for prompt in prompts]
    for step in range(steps):
        drawn = sampler.step(step)
        lengths = [counts[index] for index in drawn]
        by_bytes = by_length([Prompt(index, prompts[index]) for index in drawn])
        for total, order in zip(found, (range(per_step), by_bytes, by_tokens(lengths)), strict=True):
            padding, every = padded(lengths, order, size)
            total[0] += padding
            total[1] += every
    return [padding / every for padding, every in found]


def by_tokens(lengths: Sequence[int]) -> list[int]:
    """Returns the places of the lengths in ascending order."""
    return sorted(range(len(lengths)), key=lengths.__getitem__)


def words(text: str) -> int:
    """Returns the number of words and punctuation marks."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    tokens = words
    if given.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(given.tokenizer, local_files_only=True)

        def tokens(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompts = [prompt.text for prompt in loaded(given.file, given.prompts_per_step, given.steps)]
    counts = sorted(map(tokens, prompts))
    print(f"{counts[0]} to {counts[-1]} tokens, {sum(counts) / len(counts):.1f} on average")
    rows = [(size, share(prompts, tokens, given.prompts_per_step, given.steps, size)) for size in SIZES]
    head = ("tickets per batch", "by number", "by length in bytes", "by length in tokens")
    print(markdown_table(head, [(str(size), *(f"{each:.1%}" for each in found)) for size, found in rows]))


if __name__ == "__main__":
    main()
