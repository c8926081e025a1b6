"""Reward server for ImageReward: python image_reward_server.py --port 8000. Needs image_reward.txt and the weights.

The model itself has never been run, for lack of the weights; the part without them is tested.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from PIL import Image

from async_flowrl.cli import reward_server as server
from async_flowrl.types import ByteArray, Prompt

Score = Callable[[str, Any], float]
"""Type of `score` of the model that ImageReward.load returns: a prompt and one image → a number."""


def scorer(score_one: Score) -> Callable[[ByteArray, Prompt], list[float]]:
    """Returns the scoring function, which scores one image after another, as the package itself does for a list."""

    def score(images: ByteArray, prompt: Prompt) -> list[float]:
        return [float(score_one(prompt.text, Image.fromarray(image))) for image in images]

    return score


def main() -> int:
    parser = argparse.ArgumentParser(description="Serves ImageReward.")
    parser.add_argument("--model", default="ImageReward-v1.0", help="a name that ImageReward knows, or a file")
    parser.add_argument("--device", default="cuda")
    server.add_arguments(parser)
    given = parser.parse_args()
    try:
        server.settings_of(given)
        import ImageReward
        import torch

        model = ImageReward.load(given.model, device=given.device)
        return server.serve(scorer(torch.inference_mode()(model.score)), given, "ImageReward")
    except server.ServeError as error:
        sys.stderr.write(f"image_reward_server: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
