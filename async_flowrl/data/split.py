"""Held-out prompts: the choice of prompts that are evaluated and never trained.

The choice depends only on a hash of the prompt's text and a seed. Duplicates are therefore on the same side, and with
`held_out` a prompt stays on its side when the file grows.
"""

import numpy as np
import numpy.typing as npt

from async_flowrl.data.store import TextKeys
from async_flowrl.seeds import derive

MIN_DISTINCT = 64
"""Smallest number of distinct prompts with which some are held out by default."""
MAX_DEFAULT_HELD_OUT = 16
"""Largest number of distinct prompts that are held out by default."""
MIN_PROMPTS_PER_HELD_OUT = 8
"""By default, at most one distinct prompt in this many is held out."""


def held_out(texts: TextKeys, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Returns [prompts] True for prompts that are held out, if `share` (0..1) of all texts are."""
    return _numbers(texts, seed).astype(np.float64) < share * 2.0**64


def held_out_by_default(texts: TextKeys, seed: int) -> npt.NDArray[np.bool_] | None:
    """Returns [prompts] True for prompts held out by default; None if there are fewer than MIN_DISTINCT texts.

    The texts with the smallest hashes are held out: 16 of them, or an eighth of all distinct texts if that is less.
    """
    numbers = _numbers(texts, seed)
    distinct = np.unique(numbers)
    if len(distinct) < MIN_DISTINCT:
        return None
    return np.asarray(numbers < distinct[min(MAX_DEFAULT_HELD_OUT, len(distinct) // MIN_PROMPTS_PER_HELD_OUT)])


def _numbers(texts: TextKeys, seed: int) -> TextKeys:
    """Returns evenly distributed hashes: splitmix64's last step (Steele, Lea and Flood 2014) of text and seed."""
    z = texts ^ np.uint64(derive(seed, "held_out"))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
