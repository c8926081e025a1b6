"""The best evaluated version: its LoRA beside the newest one's."""

from collections.abc import Sequence
from pathlib import Path

from async_flowrl.config.schema import Config
from async_flowrl.observability.evaluation_summary import best_row
from async_flowrl.observability.evaluations import Evaluation
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.policies.lora_file import save as save_lora
from async_flowrl.training.checkpoint import read_checkpoint


def export_best(config: Config, directory: RunDirectory, history: Sequence[Evaluation]) -> Path | None:
    """Writes the LoRA that the best version was evaluated with to lora_best/; None where no version is kept as best.

    Raises DamagedCheckpoint or OSError where its checkpoint is not there to read.
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
