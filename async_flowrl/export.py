"""python -m async_flowrl.export CHECKPOINT_OR_RUN_DIR OUT: a LoRA that `pipe.load_lora_weights(OUT)` loads.

A folder saved by PEFT's own `save_pretrained` does not do: its names start with `base_model.model.`, diffusers matches
none of them, warns, and generates with the untouched base model.
"""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from async_flowrl.policies import lora_file
from async_flowrl.training.checkpoint import MANIFEST, find_checkpoint, read_checkpoint
from async_flowrl.types import FloatArray

logger = logging.getLogger(__name__)


def save_lora(
    folder: Path | str, source: nn.Module | Mapping[str, Tensor] | Mapping[str, FloatArray], *, alpha: float
) -> Path:
    """Writes `folder`/pytorch_lora_weights.safetensors with its metadata from a live transformer or from named tensors.

    Names are layout names; the rank is read off the tensors. The file appears whole or not at all.
    """
    if isinstance(source, nn.Module):
        from async_flowrl.policies.lora import lora_parameters

        return lora_file.write(Path(folder), lora_parameters(source), alpha=alpha)
    return lora_file.write(Path(folder), {name: torch.as_tensor(value) for name, value in source.items()}, alpha=alpha)


def export(source: Path, out: Path, *, average: bool = True) -> Path:
    """Exports a checkpoint, or the newest sound checkpoint of a run directory; returns the LoRA file.

    With `average`, the EMA of the weights where the run kept one. Raises ValueError where there is no sound checkpoint.
    """
    checkpoint = read_checkpoint(_checkpoint(source))
    part = "ema" if average and "ema" in checkpoint.tensors else "weights"
    return save_lora(out, checkpoint.tensors[part], alpha=float(checkpoint.trainer["lora"]["alpha"]))


def _checkpoint(source: Path) -> Path:
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; give a run directory or one of its checkpoints/step_N")
    if (source / MANIFEST).is_file():
        return source
    for folder in (source / "checkpoints", source):
        newest = find_checkpoint(folder)
        if newest is not None:
            return newest
    raise ValueError(f"{source} holds no sound checkpoint (checkpoints/step_N with a {MANIFEST})")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m async_flowrl.export", description="Writes a LoRA that diffusers' pipe.load_lora_weights loads."
    )
    parser.add_argument("source", type=Path, metavar="CHECKPOINT_OR_RUN_DIR")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for pytorch_lora_weights.safetensors")
    parser.add_argument("--raw", action="store_true", help="the trained weights even if the run kept their EMA")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        written = export(given.source.expanduser(), given.out.expanduser(), average=not given.raw)
    except ValueError as error:
        logger.error("%s", error)
        return 2
    logger.info("wrote %s", written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
