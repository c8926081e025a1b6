"""Held-out reward of the glyphs example: recognises letters by template matching, without a neural network.

Held out means measured in evaluations and not trained on. examples/glyphs/hacked_runs.py uses it as

evaluate.reward.terms: {templates: {name: "examples.glyphs.held_out:Templates"}}
"""

from collections.abc import Sequence

import numpy as np

from async_flowrl.types import ByteArray, Prompt
from examples.glyphs.audit import standardised, templates
from examples.glyphs.words import LETTERS, SIDE


class Templates:
    """Reward: share of an image's three letters that are recognised by template matching.

    A letter is recognised if, among drawings of all ten capitals, a drawing of the right one correlates best with the
    letter's cell. Takes images uint8 [n, 32, 32, 3] and the word in `prompt.target`; returns 0, 1/3, 2/3 or 1 per
    image. Raises ValueError for images of another size and for words that `check` refuses.
    """

    needs_target = True

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError if `prompt.target` is not three letters of `LETTERS`."""
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
