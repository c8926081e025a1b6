"""Rewards that are formulas of the pixels of images, or of videos, without weights."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from async_flowrl.config.error_text import unknown_name
from async_flowrl.config.resolution import height_width
from async_flowrl.observability.statistics import distances
from async_flowrl.rewards.base import PromptRefused
from async_flowrl.rewards.http_contract import encode_image
from async_flowrl.types import ByteArray, Prompt

if TYPE_CHECKING:
    from torch import Tensor


def sharpness(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Returns the variance of the Laplacian (OpenCV) of each grey image in 0 .. 255 (Pech-Pacheco et al. 2000).

    Detail, noise and contrast raise it. Photographs have some hundreds, an image out of focus less than about 100.
    """
    import cv2  # installed with rapidocr

    grey = [cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2GRAY) for image in images]
    return [float(cv2.Laplacian(image, cv2.CV_64F).var()) for image in grey]


def _sharpness_of_tensor(images: "Tensor", prompt: Prompt) -> "Tensor":
    import torch
    from torch.nn import functional

    red, green, blue = (255.0 * images).unbind(dim=1)
    grey = (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]
    # The border is reflected as OpenCV does it; the gradient of torch's own padding is not repeatable on a GPU.
    grey = torch.cat([grey[:, :, 1:2], grey, grey[:, :, -2:-1]], dim=2)
    grey = torch.cat([grey[..., 1:2], grey, grey[..., -2:-1]], dim=3)
    kernel = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]], device=images.device)
    return functional.conv2d(grey, kernel[None, None]).flatten(1).var(dim=1, correction=0)


cast("Any", sharpness).differentiable, cast("Any", sharpness).of_tensor = True, _sharpness_of_tensor


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


def contrast(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Returns the 95th minus the 5th percentile of each image's greys (means of the channels) in 0 .. 1."""
    low, high = np.percentile(images.mean(axis=-1).reshape(len(images), -1) / 255, (5, 95), axis=1)
    return [float(difference) for difference in high - low]


def diversity(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Returns each image's mean distance (`statistics.distances`) to the others of its group; 0 for one alone.

    The mean over a group is the diversity that evaluations report. It keeps a group apart; it says nothing of a model
    that makes the same images of all prompts.
    """
    between, count = np.zeros((len(images), len(images))), len(images)
    between[np.triu_indices(count, 1)] = distances(images)
    return [float(total) for total in (between + between.T).sum(axis=1) / max(1, count - 1)]


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


def flicker(videos: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Returns 1 - the mean of |change from a frame to the next| / 255 of each video [n, F, H, W, 3]: 1 if it is still.

    That is "temporal flickering" of VBench (arXiv 2311.17982), which takes it of scenes that should stand still.
    """
    changes = [[np.abs(b - a).mean() for a, b in pairwise(video.astype(np.float64))] for video in videos]
    return [1.0 - float(np.mean(of_video or [0.0])) / 255.0 for of_video in changes]


def motion(videos: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Returns the motion of each video [n, F, H, W, 3], 0 if it is still to 1 if every frame moves as below, or more.

    Of a pair of frames it is the mean length of the longest 5 % of the optical flow, divided by 6 / 256 of the shorter
    side, and at most 1; from there on VBench (arXiv 2311.17982, "dynamic degree") calls a frame dynamic. The flow is
    Farnebäck's of OpenCV (2003), not RAFT's: noise and flashes move, too.
    """
    return [float(np.mean([_moved(a, b) for a, b in pairwise(video)] or [0.0])) for video in videos]


def _moved(before: ByteArray, after: ByteArray) -> float:
    import cv2  # installed with rapidocr

    first, second = (cv2.cvtColor(np.ascontiguousarray(frame), cv2.COLOR_RGB2GRAY) for frame in (before, after))
    start = np.zeros((*first.shape, 2), dtype=np.float32)
    flow = cv2.calcOpticalFlowFarneback(first, second, start, 0.5, 3, 15, 3, 5, 1.2, 0)
    lengths = np.sort(np.linalg.norm(flow.astype(np.float64), axis=-1), axis=None)
    fastest = float(lengths[-max(1, len(lengths) // 20) :].mean())
    return min(1.0, fastest / (6.0 / 256.0 * float(min(first.shape))))


# Column of a row: left, top, right and bottom of what an edit may change, in pixels of its first image.
EDIT_BOX = "edit_box"
MAX_STRETCH = 1.1  # Most by which the ratio of the sides of a result may differ from that of its source.


class EditConsistency:
    """Scores an edit by 1 - the mean of |result - source| / 255: 1 if nothing has changed, 0 if black became white.

    That is the L1 distance of MagicBrush (arXiv 2306.10012). The source, the prompt's first image, is scaled to the
    result's size. Pixels in the row's `edit_box` do not count, as PIE-Bench (arXiv 2310.01506) leaves out what an edit
    is about.
    """

    sources = True

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError for a size of another shape than the source's, or an `edit_box` that is none or all."""
        if prompt.images:
            source = prompt.images[0].size
            _counted(prompt, source if prompt.resolution is None else height_width(prompt.resolution), source)

    def __call__(self, images: ByteArray, prompt: Prompt, sources: Sequence[ByteArray]) -> Sequence[float]:
        """Raises PromptRefused if a result has other proportions than its source, or no pixel outside the box."""
        import cv2  # installed with rapidocr

        source, (height, width) = np.ascontiguousarray(sources[0]), images.shape[1:3]
        counted = _counted(prompt, (height, width), (source.shape[0], source.shape[1]))
        scaled = cv2.resize(source, (width, height), interpolation=cv2.INTER_AREA)
        distances = [cv2.norm(np.ascontiguousarray(image), scaled, cv2.NORM_L1, counted) for image in images]
        return [1.0 - distance / (3 * np.count_nonzero(counted)) / 255.0 for distance in distances]


def _counted(prompt: Prompt, size: tuple[int, int], of_source: tuple[int, int]) -> ByteArray:
    """Returns uint8 [H, W] that is 0 in the prompt's edit_box and 255 elsewhere. Raises PromptRefused."""
    if not 1 / MAX_STRETCH <= (size[1] / size[0]) / (of_source[1] / of_source[0]) <= MAX_STRETCH:
        sizes = f"a result has {size[0]} × {size[1]} px (height × width), its source {of_source[0]} × {of_source[1]}"
        raise PromptRefused(f"edit_consistency compares pixels, and {sizes}: give the row a size of its shape")
    mask, box = np.full(size, 255, dtype=np.uint8), prompt.metadata.get(EDIT_BOX)
    if box is None:
        return mask
    corners = np.asarray(box if isinstance(box, list | tuple | np.ndarray) else [])
    if corners.shape != (4,) or corners.dtype.kind not in "iuf" or not np.isfinite(corners).all():
        raise PromptRefused(f"{EDIT_BOX} must be four numbers, left, top, right and bottom, got {box!r:.80}")
    corners = corners.clip(0, [of_source[1], of_source[0]] * 2)
    if (corners[:2] >= corners[2:]).any():
        where = f"the image of {of_source[0]} × {of_source[1]} px (height × width)"
        raise PromptRefused(f"{EDIT_BOX}, left, top, right and bottom, must cover a part of {where}, got {box!r:.80}")
    scale = np.array([size[1] / of_source[1], size[0] / of_source[0]] * 2)
    left, top, right, bottom = np.rint(corners * scale).astype(int)
    mask[top:bottom, left:right] = 0
    if not mask.any():
        raise PromptRefused(f"{EDIT_BOX} {box!r:.80} leaves no pixel of {size[0]} × {size[1]} (height × width)")
    return mask


for _reward in (flicker, motion):
    _reward.video = True  # type: ignore[attr-defined]
