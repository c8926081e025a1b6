"""Contact sheets: pictures of videos, with some frames of each side by side."""

import numpy as np

from async_flowrl.types import ByteArray

FRAMES = 4  # Most frames of a video that a sheet shows.


def contact_sheets(images: ByteArray) -> ByteArray:
    """Returns one picture per video, uint8 [n, F, H, W, 3] → [n, H, k W, 3]; images [n, H, W, 3] stay as they are.

    The k = min(F, FRAMES) frames are evenly spaced from the first to the last.
    """
    if images.ndim == 4:
        return images
    frames = images.shape[1]
    chosen = images[:, np.linspace(0, frames - 1, min(frames, FRAMES)).round().astype(int)]
    return np.concatenate(list(chosen.swapaxes(0, 1)), axis=2)
