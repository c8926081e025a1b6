"""Share of padding among the text positions of batches of tickets, by the order in which batches take prompts.

    python -m benchmarks.padding PROMPTS [--tokenizer FOLDER] [--prompts-per-step 16] [--steps 50]

PROMPTS is a text file with one prompt per line. Nothing is timed. Without --tokenizer a token is a word or a
punctuation mark.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from async_flowrl.data.sampler import Sampler
from async_flowrl.tickets.batches import by_length
from async_flowrl.types import Prompt

SIZES = 2, 4, 8


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
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
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

    prompts = [line for line in given.prompts.read_text().splitlines() if line.strip()]
    counts = sorted(map(tokens, prompts))
    print(f"{len(prompts)} prompts of {counts[0]} to {counts[-1]} tokens, {sum(counts) / len(counts):.1f} on average")
    print("| tickets per batch | by number | by length in bytes | by length in tokens |\n|---|---|---|---|")
    for size in SIZES:
        found = share(prompts, tokens, given.prompts_per_step, given.steps, size)
        print(f"| {size} | {' | '.join(f'{each:.1%}' for each in found)} |")


if __name__ == "__main__":
    main()
