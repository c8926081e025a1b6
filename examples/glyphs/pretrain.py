"""Pretraining of the glyphs model, a small Qwen-Image that writes three capitals badly; takes three to five minutes.

python -m examples.glyphs.pretrain
python -m async_flowrl.main --config-name one_step_off experiment=glyphs model.path=~/.cache/async_flowrl/glyphs
"""

import argparse
import logging
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from async_flowrl.config.paths import cache_dir
from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies.pipeline_family import quiet
from async_flowrl.policies.qwen_image import tiny_pipeline
from async_flowrl.seeds import untouched_rng
from examples.glyphs.flow import STEPS, generate, legibility, train_flow
from examples.glyphs.vae import reconstruct, small_vae, train_vae
from examples.glyphs.words import TEST

log = logging.getLogger("glyphs")

VAE_STEPS = 700
FLOW_STEPS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=cache_dir() / "glyphs", help="diffusers folder to write")
    parser.add_argument("--vae-steps", type=int, default=VAE_STEPS)
    parser.add_argument("--flow-steps", type=int, default=FLOW_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    torch.set_num_threads(arguments.threads)
    began = time.monotonic()
    with untouched_rng(arguments.seed), quiet():
        pipeline = pretrain(arguments.vae_steps, arguments.flow_steps)
    log.info("pretraining took %.0f s", time.monotonic() - began)
    save(pipeline, arguments.out)
    log.info("saved to %s", arguments.out)
    report(pipeline, arguments.out / "samples.png")


def pretrain(vae_steps: int, flow_steps: int) -> Any:
    """Trains VAE, transformer and text encoder and returns the pipeline.

    Random numbers come from torch's global CPU generator and from fixed seeds.
    """
    from diffusers import QwenImagePipeline

    vae = small_vae()
    train_vae(vae, vae_steps)
    bare = tiny_pipeline(TinyConfig(layers=2, heads=8, contrast=1.0))
    pipeline = QwenImagePipeline(**{**bare.components, "vae": vae})
    train_flow(pipeline, flow_steps)
    return pipeline


def save(pipeline: Any, folder: Path) -> None:
    """Writes the pipeline as a diffusers folder and replaces an older one.

    It is written beside `folder` and renamed at the end, so that no reader finds half a model. Raises FileExistsError
    if `folder` exists and is not a diffusers folder.
    """
    if folder.exists() and not (folder / "model_index.json").is_file():
        raise FileExistsError(f"{folder} exists and is not a diffusers folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    pipeline.save_pretrained(work, safe_serialization=True)
    work.chmod(0o755)
    if folder.exists():
        shutil.rmtree(folder)
    work.rename(folder)


def report(pipeline: Any, picture: Path) -> None:
    """Logs OCR scores of the held-out words (not trained on) and writes a picture of generated ones.

    Scores are of drawings, of drawings after the VAE, and of generated images with `STEPS` steps, 40 steps, and
    guidance 3.
    """
    drawn, again = reconstruct(pipeline.vae, TEST, seed=3)
    log.info(
        "held-out words drawn: %.2f; through the VAE: %.2f", *(legibility(x[:, None], TEST) for x in (drawn, again))
    )
    for name, steps, guidance in ((f"{STEPS} steps", STEPS, 1.0), ("40 steps", 40, 1.0), ("guidance 3", STEPS, 3.0)):
        images = generate(pipeline, TEST, 4, steps=steps, guidance=guidance)
        log.info("held-out words generated, %s: %.2f", name, legibility(images, TEST))
        if steps == STEPS and guidance == 1.0:
            grid = np.concatenate([np.concatenate(list(row), axis=1) for row in images.swapaxes(0, 1)])
            Image.fromarray(grid).resize((grid.shape[1] * 3, grid.shape[0] * 3), Image.Resampling.NEAREST).save(picture)


if __name__ == "__main__":
    main()
