"""The rewards `sharpness` and `colorfulness`: formulas of an image's pixels, without weights and prompt."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from async_flowrl.types import ByteArray, Prompt


def sharpness(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Returns the variance of the Laplacian (OpenCV) of each grey image in 0 .. 255 (Pech-Pacheco et al. 2000).

    Detail, noise and contrast raise it. Photographs have some hundreds, an image out of focus less than about 100.
    """
    import cv2  # installed with rapidocr

    grey = [cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2GRAY) for image in images]
    return [float(cv2.Laplacian(image, cv2.CV_64F).var()) for image in grey]


def colorfulness(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Returns M3 of Hasler and Süsstrunk 2003 ("Measuring colourfulness in natural images", eq. 11), in 0 .. 298.

    Grey images have 0. The authors call 15 slightly, 33 moderately, 59 quite and 109 extremely colourful.
    """
    return [_colorfulness(image.astype(np.float64)) for image in images]


def _colorfulness(image: npt.NDArray[np.float64]) -> float:
    red, green, blue = np.moveaxis(image, -1, 0)
    opponents = red - green, (red + green) / 2 - blue
    spread = np.hypot(*(axis.std() for axis in opponents))
    distance = np.hypot(*(axis.mean() for axis in opponents))
    return float(spread + 0.3 * distance)
