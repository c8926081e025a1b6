"""Differentiable reward of the glyphs example: log-probability of the asked letters by template matching.

async-flowrl train --config-name one_step_off experiment=glyphs_direct_align
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from async_flowrl.types import ByteArray, Prompt
from examples.glyphs.audit import templates
from examples.glyphs.held_out import Templates
from examples.glyphs.words import LETTERS

SHARPNESS = 20.0
"""Factor on correlations before the softmax over letters; drawn words then have about -0.1."""


class Reader(Templates):
    """Reward: mean log-probability of an image's three letters; its gradient is taken by `algorithm=direct_align`.

    A letter's logit is `SHARPNESS` times the largest correlation of its cell with a drawing of the letter, softly
    (logsumexp), and the softmax is over all ten capitals. No OCR model and no weights are involved.
    """

    differentiable = True

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        pixels = torch.from_numpy(images.astype(np.float32) / 255).permute(0, 3, 1, 2)
        return [float(score) for score in self.of_tensor(pixels, prompt)]

    def of_tensor(self, images: Tensor, prompt: Prompt) -> Tensor:
        """Returns the scores [n], with their gradient, of images float32 [n, 3, 32, 32] in 0 .. 1."""
        self.check(prompt)
        grey, scores = images.mean(dim=1), []
        for place, letter in enumerate(prompt.target or ""):
            cells = grey[:, :, 1 + 10 * place : 11 + 10 * place].flatten(1)
            cells = torch.nn.functional.normalize(cells - cells.mean(dim=1, keepdim=True), dim=1)
            drawn = [torch.from_numpy(templates(other, place)).to(cells) for other in LETTERS]
            logits = torch.stack([torch.logsumexp(SHARPNESS * cells @ of.T, dim=1) for of in drawn], dim=1)
            scores.append(torch.log_softmax(logits, dim=1)[:, LETTERS.index(letter)])
        return torch.stack(scores).mean(dim=0)
