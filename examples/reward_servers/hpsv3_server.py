"""Reward server for HPSv3: python hpsv3_server.py --port 8000. Needs hpsv3.txt and the weights, of 7B parameters.

The model itself has never been run, for lack of the weights; the part without them is tested.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from async_flowrl.cli import reward_server as server
from async_flowrl.types import ByteArray, Prompt

Reward = Callable[[list[Any], list[str]], Any]
"""Type of HPSv3RewardInferencer.reward: images and prompts → [n, 2], per image the mean of its score and the logarithm
of the score's standard deviation, as the package's "uncertainty" loss reads it."""


def scorer(reward: Reward, batch_size: int) -> Callable[[ByteArray, Prompt], Sequence[dict[str, float]]]:
    """Returns the scoring function: `score` is the mean, as in the package's own example, `sigma` the deviation."""

    def score(images: ByteArray, prompt: Prompt) -> list[dict[str, float]]:
        pictures = [Image.fromarray(image) for image in images]
        results = []
        for start in range(0, len(pictures), batch_size):
            part = pictures[start : start + batch_size]
            results += [(float(row[0]), math.exp(row[1])) for row in reward(part, [prompt.text] * len(part))]
        return [{"score": mean, "sigma": sigma} for mean, sigma in results]

    return score


def main() -> int:
    parser = argparse.ArgumentParser(description="Serves HPSv3.")
    parser.add_argument("--checkpoint", help="HPSv3.safetensors; by default from the hub")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=8)
    server.add_arguments(parser)
    given = parser.parse_args()
    try:
        server.settings_of(given)
        import torch
        from hpsv3 import HPSv3RewardInferencer

        model = HPSv3RewardInferencer(checkpoint_path=given.checkpoint, device=given.device)
        reward = torch.inference_mode()(model.reward)
        return server.serve(scorer(reward, given.batch_size), given, "HPSv3")
    except server.ServeError as error:
        sys.stderr.write(f"hpsv3_server: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
