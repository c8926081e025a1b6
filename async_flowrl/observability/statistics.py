"""Statistics of evaluations: means with standard errors, paired differences, and the diversity of images.

Scores of images of one prompt are correlated, so standard errors are computed over the means of prompts and not over
images (cluster-robust standard errors; Miller 2024, "Adding Error Bars to Evals", sections 2.2 and 4). With a single
prompt they are computed over its images.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from async_flowrl.observability.contact_sheet import contact_sheets
from async_flowrl.types import ByteArray

Numbers = npt.NDArray[np.float64]
# Index of the prompt → one score per image, in image order.
ByPrompt = Mapping[int, Sequence[float]]
CONFIDENCE_LEVEL = 0.95
CHANGE_FIELDS = ("change", "change_stderr", "change_low", "change_high")
# Pixels to which larger images are reduced before their distance is taken.
DIVERSITY_SIDE = 64


@dataclass(frozen=True)
class Estimate:
    """A mean score and its error; `stderr`, `low` and `high` are None if there is only one image.

    `mean` is over prompts of their means over images, `std` the population standard deviation over all images, `low`
    and `high` the confidence interval by Student's t, with (prompts - 1) degrees of freedom, or (images - 1) for a
    single prompt.
    """

    mean: float
    std: float
    stderr: float | None
    low: float | None
    high: float | None
    prompts: int


@dataclass(frozen=True)
class Change:
    """The mean of paired differences (now - before), its standard error (None for one pair), and Student's freedom."""

    mean: float
    stderr: float | None
    freedom: int

    @property
    def half(self) -> float | None:
        from scipy.special import stdtrit

        quantile = (1.0 + CONFIDENCE_LEVEL) / 2
        return None if self.stderr is None else float(stdtrit(self.freedom, quantile)) * self.stderr

    @property
    def ends(self) -> tuple[float, float] | tuple[None, None]:
        half = self.half
        return (None, None) if half is None else (self.mean - half, self.mean + half)

    def fields(self) -> dict[str, float | None]:
        return dict(zip(CHANGE_FIELDS, (self.mean, self.stderr, *self.ends), strict=True))

    def p_above(self) -> float:
        """One-sided p-value (Student's t) of the hypothesis of no change against an increase; 1 without `stderr`."""
        return _tail(self.mean, self.stderr, self.freedom)

    def p_below(self) -> float:
        """One-sided p-value of the hypothesis of no change against a decrease; 1 without `stderr`."""
        return _tail(-self.mean, self.stderr, self.freedom)


def estimate(scores: ByPrompt) -> Estimate:
    """The estimate from at least one prompt with at least one image; all prompts have the same weight."""
    images = [float(x) for group in scores.values() for x in group]
    units = _units([np.asarray(group, dtype=np.float64) for group in scores.values()])
    mean, stderr = float(np.mean(units)), _stderr(units)
    low, high = Change(mean, stderr, len(units) - 1).ends
    return Estimate(mean, float(np.std(images)), stderr, low, high, len(scores))


def change(now: ByPrompt, before: ByPrompt) -> Change | None:
    """The change over the prompts that both have, pairing images of the same initial noise; None without any.

    Raises ValueError if a prompt has different numbers of images in the two.
    """
    common = [place for place in now if place in before]
    if not common:
        return None
    if any(len(now[place]) != len(before[place]) for place in common):
        raise ValueError("evaluations with different numbers of images per prompt cannot be paired")
    units = _units([np.subtract(now[place], before[place], dtype=np.float64) for place in common])
    return Change(float(np.mean(units)), _stderr(units), len(units) - 1)


def diversity(images: ByteArray) -> float | None:
    """Mean of the `distances` between two of the images of one prompt; None for fewer than two images."""
    return float(np.mean(distances(images))) if len(images) > 1 else None


def distances(images: ByteArray) -> Numbers:
    """Returns the distance of each pair of images uint8 [n, H, W, 3], as `itertools.combinations` orders them.

    It is the root mean square of their differences over pixels and channels, with values in 0 .. 1, after images larger
    than DIVERSITY_SIDE pixels were reduced to that size.
    """
    small = [_reduced(image) for image in contact_sheets(images)]
    return np.array([math.sqrt(float(np.mean((a - b) ** 2))) for a, b in combinations(small, 2)])


def _reduced(image: ByteArray) -> Numbers:
    # The image as [h, w, C] in 0 .. 1, averaged over square blocks so that no side exceeds DIVERSITY_SIDE pixels.
    height, width = image.shape[:2]
    factor = min(-(-max(height, width) // DIVERSITY_SIDE), height, width)
    rows, columns = height // factor, width // factor
    whole = image[: rows * factor, : columns * factor].astype(np.float64)
    small: Numbers = whole.reshape(rows, factor, columns, factor, -1).mean(axis=(1, 3)) / 255.0
    return small


def _units(groups: Sequence[Numbers]) -> Numbers:
    # The independent observations: the means of the prompts, or the scores of the images if there is one prompt.
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
