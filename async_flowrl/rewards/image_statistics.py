"""Rewards that are formulas of an image's pixels, without weights: sharpness, colorfulness, color and the JPEG size."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from async_flowrl.config.error_text import unknown_name
from async_flowrl.rewards.http_contract import encode_image
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


CHANNELS = {"red": 0, "green": 1, "blue": 2}


class Color:
    """Scores an image by the mean of one colour channel minus the mean of the other two, from -1 to 1.

    `channel` is red, green or blue for all prompts; with None, the first word of each prompt names the channel.
    """

    def __init__(self, channel: str | None = None) -> None:
        if channel is not None and channel not in CHANNELS:
            raise ValueError(unknown_name("channel", channel, CHANNELS))
        self.channel = channel

    def check(self, prompt: Prompt) -> None:
        self._channel(prompt)

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        means = images.reshape(len(images), -1, 3).mean(axis=1, dtype=np.float64) / 255.0
        chosen = means[:, self._channel(prompt)]
        others = (means.sum(axis=1) - chosen) / 2.0
        return [float(value) for value in chosen - others]

    def _channel(self, prompt: Prompt) -> int:
        word = self.channel or next(iter(prompt.text.lower().split()), "")
        if word not in CHANNELS:
            raise ValueError(unknown_name(f"the first word of prompt {prompt.text!r}", word, CHANNELS))
        return CHANNELS[word]


def jpeg_incompressibility(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Returns the size as a JPEG file (JPEG_QUALITY), in units of 1000 bytes: noise and detail score high."""
    return [len(encode_image(image, "jpeg")) / 1000 for image in images]


def jpeg_compressibility(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Returns minus the JPEG size in kilobytes: flat areas score high. flow_grpo divides it by 500."""
    return [-size for size in jpeg_incompressibility(images, prompt)]
