"""Reward server for GenEval: python geneval_server.py --checkout reward-server --config CONFIG --weights FOLDER.

It needs the packages of geneval.txt, a checkout of github.com/yifan123/reward-server, whose code computes the scores,
and the detector's weights. Every prompt is a row of GenEval: the prompt file must have `tag` and `include`. The scoring
itself has never been run, for lack of the weights and a GPU; the part without them is tested.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from async_flowrl.serve_rewards import server
from async_flowrl.types import ByteArray, Prompt

Compute = Callable[[list[Any], list[dict[str, Any]], bool], Sequence[Any]]
"""Type of what `load_geneval` returns: a function of images, one row of GenEval per image, and whether to leave out the
benchmark's own judgement. It returns the scores, the judgement (0 or 1), the strict judgement, and both by task."""


def scorer(compute: Compute) -> Callable[[ByteArray, Prompt], list[dict[str, float]]]:
    """Returns the scoring function, which returns one dictionary per image and raises ValueError for an incomplete row.

    `score` is the share of the requested things in the image, which flow_grpo trains on. `correct` is the benchmark's
    judgement, and `strict` is the same with exact counts.
    """

    def score(images: ByteArray, prompt: Prompt) -> list[dict[str, float]]:
        row = {**prompt.metadata, "prompt": prompt.text}
        if missing := [key for key in ("tag", "include") if key not in row]:
            raise ValueError(f"{prompt.text!r:.80} is no row of GenEval: it has no {' and no '.join(missing)}")
        pictures = [Image.fromarray(image) for image in images]
        shares, correct, strict, *_ = compute(pictures, [row] * len(pictures), False)
        return [
            {"score": float(share), "correct": float(right), "strict": float(exact)}
            for share, right, exact in zip(shares, correct, strict, strict=True)
        ]

    return score


def loaded(checkout: Path, config: Path, weights: Path) -> Compute:
    """Imports the checkout's code, sets its paths, and changes into its folder, from which it reads some files."""
    sys.path.insert(0, str(checkout.resolve()))
    from reward_server import gen_eval  # type: ignore[import-not-found]

    gen_eval.MY_CONFIG_PATH, gen_eval.MY_CKPT_PATH = str(config.resolve()), str(weights.resolve())
    os.chdir(checkout)
    compute: Compute = gen_eval.load_geneval()
    return compute


def main() -> int:
    parser = argparse.ArgumentParser(description="Serves GenEval.")
    parser.add_argument("--checkout", type=Path, required=True, help="of github.com/yifan123/reward-server")
    parser.add_argument("--config", type=Path, required=True, help="mmdetection's mask2former_swin-s-…_coco.py")
    parser.add_argument("--weights", type=Path, required=True, help="folder with mask2former_swin-s-…_coco.pth")
    server.add_arguments(parser)
    given = parser.parse_args()
    if given.token_file is not None:
        given.token_file = given.token_file.expanduser().resolve()  # it is read again after the chdir of `loaded`
    try:
        server.settings_of(given)
        return server.serve(scorer(loaded(given.checkout, given.config, given.weights)), given, "GenEval")
    except server.ServeError as error:
        sys.stderr.write(f"geneval_server: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
