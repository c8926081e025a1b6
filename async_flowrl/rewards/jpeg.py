"""JPEG size rewards: the compressibility rewards of DDPO (Black et al. 2023, section 5.1), as in flow_grpo."""

import io
from collections.abc import Sequence

from PIL import Image

from async_flowrl.types import ByteArray, Prompt

QUALITY = 95
KILOBYTE = 1000


def jpeg_kilobytes(images: ByteArray) -> list[float]:
    """Returns the sizes of images uint8 [n, H, W, 3] as JPEG files at quality 95, in units of 1000 bytes."""
    sizes = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="JPEG", quality=QUALITY)
        sizes.append(buffer.tell() / KILOBYTE)
    return sizes


def jpeg_incompressibility(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Returns the JPEG size in kilobytes: noise and detail score high."""
    return jpeg_kilobytes(images)


def jpeg_compressibility(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Returns minus the JPEG size in kilobytes: flat areas score high.

    flow_grpo divides this reward by 500. To have the same scale here, set the term's weight to 1/500 = 0.002.
    """
    return [-size for size in jpeg_kilobytes(images)]
