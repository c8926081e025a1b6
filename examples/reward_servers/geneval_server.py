"""GenEval behind our contract: python geneval_server.py --checkout reward-server --config CONFIG --weights FOLDER.

Needs geneval.txt, a checkout of github.com/yifan123/reward-server, whose code scores, and the detector's weights.
Prompts are rows of GenEval: `tag` and `include` must be in the prompt file. Not run here: nobody has had the weights or
a GPU. The part that needs neither is tested.
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
"""What `load_geneval` returns: images, a row of GenEval for each, and whether to leave the benchmark's own judgement
out → scores, that judgement as 0 or 1, the strict one, and both by task."""


def scorer(compute: Compute) -> Callable[[ByteArray, Prompt], list[dict[str, float]]]:
    """The score is the share of what was asked for, which flow_grpo trains on; `correct` is the benchmark's judgement,
    `strict` the same with exact counts."""

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
    """The checkout's own code, told where its files are; it reads some of them from its working directory."""
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
        given.token_file = given.token_file.expanduser().resolve()  # it is read again behind the chdir of `loaded`
    try:
        server.settings_of(given)
        return server.serve(scorer(loaded(given.checkout, given.config, given.weights)), given, "GenEval")
    except server.ServeError as error:
        sys.stderr.write(f"geneval_server: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
