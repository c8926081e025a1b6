"""Contact sheets: pictures of videos, with some frames of each side by side."""

import numpy as np

from async_flowrl.config.resolution import spaced_frames
from async_flowrl.types import ByteArray

FRAMES = 4  # Most frames of a video that a sheet shows.


def contact_sheets(images: ByteArray) -> ByteArray:
    """Returns one picture per video, uint8 [n, F, H, W, 3] → [n, H, k W, 3]; images [n, H, W, 3] stay as they are.

    The k = min(F, FRAMES) frames are evenly spaced from the first to the last.
    """
    if images.ndim == 4:
        return images
    return np.concatenate([images[:, place] for place in spaced_frames(images.shape[1], FRAMES)], axis=2)
