"""Reward server for GenEval: python geneval_server.py --port 8000.

It needs the packages of geneval_torch.txt and then geneval.txt. What computes the scores, github.com/yifan123/
reward-server, is cloned at a fixed commit, the detector's configuration is that of mmdet, and its weights are
downloaded; each can be given instead. Every prompt is a row of GenEval: the prompt file must have `tag` and `include`.
The scoring itself has never been run, for lack of the weights and a GPU; the part without them is tested.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from async_flowrl.cli import reward_server as server
from async_flowrl.rewards.base import PromptRefused
from async_flowrl.types import ByteArray, Prompt

REPOSITORY, COMMIT = "https://github.com/yifan123/reward-server", "92ac29fb322c028f8840db8f93c950422931710d"
DETECTOR = "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco"
WEIGHTS = (
    f"https://download.openmmlab.com/mmdetection/v2.0/mask2former/{DETECTOR}/{DETECTOR}_20220504_001756-743b7d99.pth"
)
SHA256 = "743b7d99"
"""Beginning of the SHA-256 of the weights, which OpenMMLab writes into their file name."""

Compute = Callable[[list[Any], list[dict[str, Any]], bool], Sequence[Any]]
"""Type of what `load_geneval` returns: a function of images, one row of GenEval per image, and whether to leave out the
benchmark's own judgement. It returns the scores, the judgement (0 or 1), the strict judgement, and both by task."""


def scorer(compute: Compute) -> Callable[[ByteArray, Prompt], list[dict[str, float]]]:
    """Returns the scoring function: one dictionary per image. It raises PromptRefused for an incomplete row.

    `score` is the share of the requested things in the image, which flow_grpo trains on: 1 at most, and below 0 if the
    image has more than twice as many objects as requested. `correct` is the benchmark's judgement, and `strict` is the
    same with exact counts.
    """

    def score(images: ByteArray, prompt: Prompt) -> list[dict[str, float]]:
        row = {**prompt.metadata, "prompt": prompt.text}
        if missing := [key for key in ("tag", "include") if key not in row]:
            raise PromptRefused(f"{prompt.text!r:.80} is no row of GenEval: it has no {' and no '.join(missing)}")
        pictures = [Image.fromarray(image) for image in images]
        shares, correct, strict, *_ = compute(pictures, [row] * len(pictures), False)
        return [
            {"score": float(share), "correct": float(right), "strict": float(exact)}
            for share, right, exact in zip(shares, correct, strict, strict=True)
        ]

    return score


def cloned(folder: Path, repository: str = REPOSITORY, commit: str = COMMIT) -> Path:
    """Returns the checkout of `commit` in `folder`, after fetching it if it is missing. Raises ServeError."""
    target = folder / commit
    if not (target / ".git").exists():
        if shutil.which("git") is None:
            raise server.ServeError(f"{repository} cannot be cloned without git; --checkout names a checkout")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{commit}.", ignore_cleanup_errors=True) as made:
            partial = Path(made) / commit
            partial.mkdir()
            for words in (["init"], ["fetch", "--depth=1", repository, commit], ["checkout", commit]):
                git(repository, partial, words)
            try:
                partial.rename(target)
            except OSError:  # another server of this node was faster
                if not target.exists():
                    raise
    return target


def git(repository: str, folder: Path, words: Sequence[str]) -> None:
    """Runs git in `folder`; it asks nobody for a password. Raises ServeError if it fails."""
    silent = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    ran = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False, env=silent)
    if ran.returncode:
        said = " ".join(ran.stderr.split())
        raise server.ServeError(f"git {words[0]} of {repository} failed ({said}); --checkout names a checkout")


def config_of_mmdet() -> Path:
    """Returns the detector's configuration, which is part of the package mmdet. Raises ServeError without it."""
    spec = importlib.util.find_spec("mmdet")
    if spec is None or spec.origin is None:
        raise server.ServeError("mmdet is not installed; --config names the detector's configuration")
    return Path(spec.origin).parent / ".mim" / "configs" / "mask2former" / f"{DETECTOR}.py"


def downloaded(folder: Path) -> Path:
    """Returns `folder` with the detector's weights in it, after downloading them if they are missing.

    Raises ServeError if they cannot be had, or are not those that were published.
    """
    target = folder / f"{DETECTOR}.pth"
    if not target.exists():
        from torch.hub import download_url_to_file  # type: ignore[import-not-found, unused-ignore]

        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{DETECTOR}.{os.getpid()}"
        try:
            download_url_to_file(WEIGHTS, str(partial), hash_prefix=SHA256)
        except (OSError, RuntimeError) as error:
            raise server.ServeError(f"cannot download {WEIGHTS} ({error}); --weights names a folder with it") from error
        partial.rename(target)
    return folder


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
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "async_flowrl" / "geneval"
    parser.add_argument("--checkout", type=Path, help=f"of {REPOSITORY} (default: one made in {cache})")
    parser.add_argument("--config", type=Path, help=f"{DETECTOR}.py (default: mmdet's)")
    parser.add_argument("--weights", type=Path, help=f"folder with {DETECTOR}.pth (default: downloaded to {cache})")
    server.add_arguments(parser)
    given = parser.parse_args()
    if given.token_file is not None:
        given.token_file = given.token_file.expanduser().resolve()  # it is read again after the chdir of `loaded`
    try:
        server.settings_of(given)
        parts = given.checkout or cloned(cache), given.config or config_of_mmdet(), given.weights or downloaded(cache)
        return server.serve(scorer(loaded(*parts)), given, "GenEval")
    except server.ServeError as error:
        sys.stderr.write(f"geneval_server: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
