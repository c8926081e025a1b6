"""Statistics of evaluations: means with errors clustered by prompt, and differences paired by prompt and by noise.

Images of one prompt are alike, so that prompts, not images, are what an error counts (cluster-robust standard errors;
Miller 2024, "Adding Error Bars to Evals", sections 2.2 and 4). With a single prompt, its images are counted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from async_flowrl.types import ByteArray

Numbers = npt.NDArray[np.float64]
ByPrompt = Mapping[int, Sequence[float]]
"""Place of the prompt → one number per image, in image order."""
LEVEL = 0.95
"""Of the intervals."""
CHANGE_FIELDS = ("change", "change_stderr", "change_low", "change_high")
DIVERSITY_SIDE = 64
"""Pixels to which larger images are reduced before their distance is taken."""


@dataclass(frozen=True)
class Estimate:
    """A mean over images and what is known of its error; `stderr`, `low` and `high` are None for a single number."""

    mean: float
    std: float
    """Population standard deviation over images."""
    stderr: float | None
    low: float | None
    high: float | None
    """The interval of LEVEL by Student's t, with one degree of freedom less than there are prompts."""
    prompts: int


@dataclass(frozen=True)
class Change:
    """The mean of paired differences, now less before. `stderr` is None where there is a single pair."""

    mean: float
    stderr: float | None
    freedom: int

    @property
    def half(self) -> float | None:
        """Half the interval of LEVEL around the mean."""
        return None if self.stderr is None else _quantile(self.freedom) * self.stderr

    def fields(self) -> dict[str, float | None]:
        """`change`, `change_stderr` and the ends of the interval, `change_low` and `change_high`."""
        half = self.half
        ends = (None, None) if half is None else (self.mean - half, self.mean + half)
        return dict(zip(CHANGE_FIELDS, (self.mean, self.stderr, *ends), strict=True))

    def p_above(self) -> float:
        """Probability of a mean so large or larger, were there no change: one-sided, Student's t."""
        return _tail(self.mean, self.stderr, self.freedom)

    def p_below(self) -> float:
        """Probability of a mean so small or smaller, were there no change."""
        return _tail(-self.mean, self.stderr, self.freedom)


def estimate(scores: ByPrompt) -> Estimate:
    """Of at least one prompt with at least one image; all prompts count alike."""
    images = [float(x) for group in scores.values() for x in group]
    units = _units([np.asarray(group, dtype=np.float64) for group in scores.values()])
    mean, stderr = float(np.mean(units)), _stderr(units)
    half = None if stderr is None else _quantile(len(units) - 1) * stderr
    return Estimate(
        mean=mean,
        std=float(np.std(images)),
        stderr=stderr,
        low=None if half is None else mean - half,
        high=None if half is None else mean + half,
        prompts=len(scores),
    )


def change(now: ByPrompt, before: ByPrompt) -> Change | None:
    """Over the prompts that both have, image against image of the same noise; None where there is no such prompt.

    Raises ValueError where a prompt has another number of images.
    """
    common = [place for place in now if place in before]
    if not common:
        return None
    if any(len(now[place]) != len(before[place]) for place in common):
        raise ValueError("evaluations with different numbers of images per prompt cannot be paired")
    units = _units([np.subtract(now[place], before[place], dtype=np.float64) for place in common])
    return Change(float(np.mean(units)), _stderr(units), len(units) - 1)


def diversity(images: ByteArray) -> float | None:
    """Mean distance of two images of a prompt: root mean square over pixels and channels, of images uint8 [n, H, W, 3]
    as numbers in 0 .. 1, reduced to DIVERSITY_SIDE pixels where they are larger. None for a single image."""
    if len(images) < 2:
        return None
    small = [_reduced(image) for image in images]
    return float(np.mean([math.sqrt(float(np.mean((a - b) ** 2))) for a, b in combinations(small, 2)]))


def _reduced(image: ByteArray) -> Numbers:
    """[h, w, C] in 0 .. 1 with at most DIVERSITY_SIDE pixels along each side: means of squares of pixels."""
    height, width = image.shape[:2]
    factor = min(-(-max(height, width) // DIVERSITY_SIDE), height, width)
    rows, columns = height // factor, width // factor
    whole = image[: rows * factor, : columns * factor].astype(np.float64)
    small: Numbers = whole.reshape(rows, factor, columns, factor, -1).mean(axis=(1, 3)) / 255.0
    return small


def _units(groups: Sequence[Numbers]) -> Numbers:
    """What is independent of each other: the means of the prompts, or the images of the only one."""
    return groups[0] if len(groups) == 1 else np.asarray([group.mean() for group in groups])


def _stderr(units: Numbers) -> float | None:
    return None if len(units) < 2 else float(np.std(units, ddof=1) / math.sqrt(len(units)))


def _tail(mean: float, stderr: float | None, freedom: int) -> float:
    from scipy.special import stdtr

    if stderr is None:
        return 1.0
    if stderr == 0.0:
        return 0.0 if mean > 0 else 1.0
    return float(stdtr(freedom, -mean / stderr))


def _quantile(freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1.0 + LEVEL) / 2))
