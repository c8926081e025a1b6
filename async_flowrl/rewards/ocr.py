"""The reward `ocr`: how well the text in an image matches the prompt's target.

RapidOCR reads the text; its weights are part of its wheel.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from async_flowrl.types import ByteArray, Prompt

if TYPE_CHECKING:
    from rapidocr import RapidOCR


def text_score(read: str, target: str) -> float:
    """Returns max(0, 1 - edit distance / target length), or 1 if `read` contains the target.

    Both are compared as `normalise` leaves them; `target` must hold something then. This is the OCR reward of Flow-GRPO
    (Liu et al. 2025, section 5.1).
    """
    from rapidfuzz.distance import Levenshtein

    seen, wanted = normalise(read), normalise(target)
    if wanted in seen:
        return 1.0
    return max(0.0, 1.0 - Levenshtein.distance(seen, wanted) / len(wanted))


ALIKE = str.maketrans(
    {**dict.fromkeys("‘’‚‛ʼ′´", "'"), **dict.fromkeys("“”„‟″«»", '"'), **dict.fromkeys("‐‑‒–—−", "-")}
)
"""Quotes and dashes → the one that stands for all that look like it."""
INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""What cannot be seen and is no format character: joiners, fillers, an empty Braille cell and variation selectors."""


def normalise(text: str) -> str:
    """Returns the text without what two readings of the same image may differ in.

    These are case, white space, invisible characters, forms of quotes and dashes, and what Unicode counts as equal
    (NFKC): decomposed accents, full-width letters, ligatures.
    """
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text.translate(ALIKE)).casefold())
    return "".join(
        letter for letter in "".join(INVISIBLE.sub("", plain).split()) if unicodedata.category(letter) != "Cf"
    )


def check_target(prompt: Prompt, who: str) -> None:
    """Raises ValueError, which names `who` needs it, if the prompt has no target, or one that no image can show."""
    if not prompt.target:
        raise ValueError(f"{who} needs a target, and prompt {prompt.text!r} has none in double quotes or a column")
    if not normalise(prompt.target):
        raise ValueError(f"{who} needs a target that can be seen, got {prompt.target!r} in prompt {prompt.text!r}")


class OCR:
    """Scores each image by the `text_score` of the text that RapidOCR reads in it against `prompt.target`.

    - `side`: largest side, in pixels, of the image that lines are searched in; larger images are scaled down for it.
    - `threads`: threads of onnxruntime; more than one is slower for this model.
    - `text_threshold`: confidence below which a line is ignored.
    - `enlarge`: whole factor by which images are enlarged first (bicubic), so that small letters are found.
    - `line_width`: width, in pixels at height 48, to which the recogniser pads shorter lines. 128 halves the time for
      short words and does not change longer lines.
    - `detect`: False reads the whole image as one line, in a third of the time.
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
        check_target(prompt, "the ocr reward")

    def read(self, image: ByteArray) -> str:
        """Returns all text of an image uint8 [H, W, 3] RGB, in the detector's reading order; empty if there is none."""
        if self._engine is None:
            from rapidocr import RapidOCR

            self._engine = RapidOCR(params=self._parameters)
        result = self._engine(np.ascontiguousarray(self._larger(image)[:, :, ::-1]))  # RapidOCR expects OpenCV's BGR
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
