"""Rewards of glyphs that nothing is trained on: the letters by template, which needs no network, and another reader.

evaluate.reward.terms: {templates: {name: "examples.glyphs.held_out:Templates"}}
"""

from collections.abc import Sequence

import numpy as np

from async_flowrl.types import ByteArray, Prompt
from examples.glyphs.audit import standardised, templates
from examples.glyphs.words import LETTERS, SIDE


class Templates:
    """Share of an image's letters that correlate best with a drawing of themselves, over sizes and shifts.

    For images uint8 [n, 32, 32, 3] of three capitals in cells of their own; `prompt.target` is the word.
    """

    needs_target = True

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError for a word that is not three of the capitals of glyphs."""
        word = prompt.target or ""
        if len(word) != 3 or set(word) - set(LETTERS):
            raise ValueError(f"prompt {prompt.text!r} must name three of the capitals {LETTERS}, got {word!r}")

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        self.check(prompt)
        if images.shape[1:3] != (SIDE, SIDE):
            raise ValueError(f"letters are looked for in images of {SIDE} x {SIDE} pixels, got {images.shape[1:3]}")
        grey = images.astype(np.float32).mean(-1)
        right = np.zeros(len(images))
        for place, letter in enumerate(prompt.target or ""):
            cells = standardised(grey[:, :, 1 + 10 * place : 11 + 10 * place])
            best = [np.max(cells @ templates(other, place).T, axis=1) for other in LETTERS]
            right += np.argmax(best, axis=0) == LETTERS.index(letter)
        return [float(share) for share in right / 3]
