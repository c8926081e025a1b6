"""OCR reward: whether the image shows the text that the prompt asks for, as read by RapidOCR (weights in its wheel)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from async_flowrl.types import ByteArray, Prompt

if TYPE_CHECKING:
    from rapidocr import RapidOCR


def text_score(read: str, target: str) -> float:
    """max(0, 1 - edit distance / target length) without case and blanks; 1 if the target is contained.

    The OCR reward of Flow-GRPO (Liu et al. 2025, section 5.1).
    """
    from rapidfuzz.distance import Levenshtein

    found, wanted = normalise(read), normalise(target)
    if wanted in found:
        return 1.0
    return max(0.0, 1.0 - Levenshtein.distance(found, wanted) / len(wanted))


def normalise(text: str) -> str:
    """Lower case, no white space."""
    return "".join(text.lower().split())


class OCR:
    """`text_score` of what is read in each image against `prompt.target`.

    `side`: the detector's working size in pixels. `threads`: onnxruntime threads; more than one is slower here.
    `text_threshold`: confidence below which a line counts as not read. `enlarge`: whole factor by which images are
    enlarged first (bicubic); small letters are found better. `line_width`: least width, in pixels at height 48, to
    which the recogniser pads a line; 128 halves its time on short words and changes nothing for longer lines.
    `detect`: whether lines are looked for; without, the whole image is read as one line, in a third of the time.
    """

    needs_target = True

    def __init__(
        self,
        side: int = 256,
        threads: int = 1,
        text_threshold: float = 0.5,
        *,
        enlarge: int = 1,
        line_width: int = 320,
        detect: bool = True,
    ) -> None:
        for name, value in (("enlarge", enlarge), ("line_width", line_width)):
            if value < 1:
                raise ValueError(f"the OCR reward's {name} must be at least 1, got {value}")
        self._enlarge = enlarge
        self._parameters: dict[str, Any] = {
            "Global.log_level": "error",
            "Global.use_det": detect,
            "Global.use_cls": False,
            "Global.text_score": text_threshold,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            "Det.limit_type": "max",
            "Det.limit_side_len": side,
            "Rec.rec_img_shape": [3, 48, line_width],
        }
        self._engine: RapidOCR | None = None

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError if the prompt names no text."""
        if not normalise(prompt.target or ""):
            raise ValueError(f"prompt {prompt.text!r} has no target text in double quotes")

    def read(self, image: ByteArray) -> str:
        """All text of an image uint8 [H, W, 3] RGB, in the detector's reading order; empty if there is none."""
        if self._engine is None:
            from rapidocr import RapidOCR

            self._engine = RapidOCR(params=self._parameters)
        result = self._engine(np.ascontiguousarray(self._larger(image)[:, :, ::-1]))  # it expects OpenCV's BGR
        return "".join(result.txts or ())

    def _larger(self, image: ByteArray) -> ByteArray:
        if self._enlarge == 1:
            return image
        height, width = image.shape[:2]
        size = width * self._enlarge, height * self._enlarge
        return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        self.check(prompt)
        return [text_score(self.read(image), prompt.target or "") for image in images]
