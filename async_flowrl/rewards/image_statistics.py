"""Rewards that measure an image by a formula: sharpness and colourfulness. No weights, no prompt."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from async_flowrl.types import ByteArray, Prompt


def sharpness(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Variance of OpenCV's Laplacian of the grey image in 0 .. 255 (Pech-Pacheco et al. 2000): detail, and noise.

    Photographs have some hundreds, an image out of focus less than about 100; it grows with contrast.
    """
    import cv2  # a dependency of rapidocr

    grey = [cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2GRAY) for image in images]
    return [float(cv2.Laplacian(image, cv2.CV_64F).var()) for image in grey]


def colorfulness(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """M3 of Hasler and Süsstrunk 2003 ("Measuring colourfulness in natural images", eq. 11), in 0 .. 298.

    0 is grey; they call 15 slightly, 33 moderately, 59 quite and 109 extremely colourful.
    """
    return [_colorfulness(image.astype(np.float64)) for image in images]


def _colorfulness(image: npt.NDArray[np.float64]) -> float:
    red, green, blue = np.moveaxis(image, -1, 0)
    opponents = red - green, (red + green) / 2 - blue
    spread = np.hypot(*(axis.std() for axis in opponents))
    distance = np.hypot(*(axis.mean() for axis in opponents))
    return float(spread + 0.3 * distance)
