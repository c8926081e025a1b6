"""The reward `ocr`: how well the text that RapidOCR reads in an image matches the prompt's target."""

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
    """Returns max(0, 1 - edit distance / target length), or 1 if `read` contains the target, both normalised.

    This is the OCR reward of Flow-GRPO (Liu et al. 2025, section 5.1); `target` must hold something.
    """
    from rapidfuzz.distance import Levenshtein

    read, target = normalise(read), normalise(target)
    return 1.0 if target in read else max(0.0, 1.0 - Levenshtein.distance(read, target) / len(target))


# Quotes and dashes → the one that stands for all that look like it.
ALIKE = str.maketrans(
    {**dict.fromkeys("‘’‚‛ʼ′´", "'"), **dict.fromkeys("“”„‟″«»", '"'), **dict.fromkeys("‐‑‒–—−", "-")}
)
# What cannot be seen and is no format character: joiners, fillers, an empty Braille cell and variation selectors.
INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\ufe00-\ufe0f\U000e0100-\U000e01ef]")


def normalise(text: str) -> str:
    """Returns the text without what two readings of the same image may differ in.

    These are case, white space, invisible characters, forms of quotes and dashes, and what Unicode counts as equal
    (NFKC): decomposed accents, full-width letters, ligatures.
    """
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text.translate(ALIKE)).casefold())
    letters = "".join(INVISIBLE.sub("", plain).split())
    return "".join(letter for letter in letters if unicodedata.category(letter) != "Cf")


def check_target(prompt: Prompt, needer: str) -> None:
    """Raises ValueError, which names `needer`, if the prompt has no target, or one that no image can show."""
    if not prompt.target:
        raise ValueError(f"{needer} needs a target, and prompt {prompt.text!r} has none in double quotes or a column")
    if not normalise(prompt.target):
        raise ValueError(f"{needer} needs a target that can be seen, got {prompt.target!r} in {prompt.text!r}")


class OCR:
    """Scores each image by the `text_score` of the text that RapidOCR reads in it against `prompt.target`.

    `side` is the largest side, in pixels, of the image that lines are searched in. `text_threshold` is the confidence
    below which a line is ignored. `enlarge` is a whole factor by which images are enlarged first (bicubic), so that
    small letters are found. `line_width` is the width, in pixels at height 48, to which the recogniser pads shorter
    lines; 128 halves the time for short words and does not change longer lines. `detect=False` reads the whole image as
    one line, in a third of the time. More than one of onnxruntime's `threads` is slower for this model.
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
        if self._enlarge > 1:
            size = image.shape[1] * self._enlarge, image.shape[0] * self._enlarge
            image = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
        result = self._engine(np.ascontiguousarray(image[:, :, ::-1]))  # RapidOCR expects OpenCV's BGR
        return "".join(result.txts or ())

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        self.check(prompt)
        return [text_score(self.read(image), prompt.target or "") for image in images]
