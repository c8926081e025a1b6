"""Held-out prompts: which prompts of a file are evaluated and never trained.

A prompt's text decides, by a number that only the text and a seed are in. So duplicates are on one side, and a file
that grows keeps the side of what it had.
"""

import numpy as np
import numpy.typing as npt

from async_flowrl.data.store import TextKeys
from async_flowrl.seeds import derive

MIN_DISTINCT = 64
"""Distinct prompts from which on some are held out without being asked."""
DEFAULT_HELD_OUT = 16
DEFAULT_SHARE = 8
"""At most one prompt in so many is held out without being asked."""


def held_out(texts: TextKeys, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which prompts are held out if `share` of all texts are (0..1)."""
    return _numbers(texts, seed).astype(np.float64) < share * 2.0**64


def held_out_by_default(texts: TextKeys, seed: int) -> npt.NDArray[np.bool_] | None:
    """Which prompts are held out where nothing is said; None for a file that is too small.

    Those of the 16 distinct texts with the smallest numbers, and never of more than one in eight.
    """
    numbers = _numbers(texts, seed)
    distinct = np.unique(numbers)
    if len(distinct) < MIN_DISTINCT:
        return None
    return np.asarray(numbers < distinct[min(DEFAULT_HELD_OUT, len(distinct) // DEFAULT_SHARE)])


def _numbers(texts: TextKeys, seed: int) -> TextKeys:
    """Evenly distributed over 64 bits: splitmix64's last step (Steele, Lea and Flood 2014) of text and seed."""
    z = texts ^ np.uint64(derive(seed, "held_out"))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
