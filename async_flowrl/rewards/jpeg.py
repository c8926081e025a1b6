"""JPEG size rewards: the toy rewards of DDPO (Black et al. 2023, section 5.1), as in flow_grpo."""

import io
from collections.abc import Sequence

from PIL import Image

from async_flowrl.types import ByteArray, Prompt

QUALITY = 95
KILOBYTE = 1000


def jpeg_kilobytes(images: ByteArray) -> list[float]:
    """Sizes of images uint8 [n, H, W, 3] as JPEG at quality 95, in units of 1000 bytes."""
    sizes = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="JPEG", quality=QUALITY)
        sizes.append(buffer.tell() / KILOBYTE)
    return sizes


def jpeg_incompressibility(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """JPEG kilobytes: rewards noise and detail."""
    return jpeg_kilobytes(images)


def jpeg_compressibility(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Minus JPEG kilobytes: rewards flat areas. (flow_grpo divides this one by 500; use weight 0.002 for its scale.)"""
    return [-size for size in jpeg_kilobytes(images)]
