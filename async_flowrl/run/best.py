"""Export of the LoRA of the best evaluated version to lora_best/, beside the newest version's."""

from collections.abc import Sequence
from pathlib import Path

from async_flowrl.config.schema import Config
from async_flowrl.observability.evaluation_summary import best_row
from async_flowrl.observability.evaluations import Evaluation
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.policies.lora_file import save as save_lora
from async_flowrl.training.checkpoint import read_checkpoint


def export_best(config: Config, directory: RunDirectory, history: Sequence[Evaluation]) -> Path | None:
    """Writes the LoRA with which the best version was evaluated and returns its path; None if no version is best.

    With `trainer.ema_decay` that LoRA is the moving average. Raises DamagedCheckpoint or OSError if the checkpoint of
    the version cannot be read.
    """
    row = best_row(config, history)
    if row is None:
        return None
    version = row["version"]
    tensors = read_checkpoint(directory.checkpoints / f"step_{version}").tensors
    if config.trainer.ema_decay is not None:
        evaluated = tensors["ema"]
    else:
        prefix = f"{version}/"
        evaluated = {n.removeprefix(prefix): t for n, t in tensors["retained"].items() if n.startswith(prefix)}
    return save_lora(directory.lora_best, dict(evaluated), alpha=config.lora.alpha, base=config.model.path)
