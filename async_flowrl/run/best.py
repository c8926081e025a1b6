"""Export of the best evaluated version's weights, beside the newest version's."""

from collections.abc import Sequence
from pathlib import Path

from async_flowrl.config.schema import Config
from async_flowrl.observability.evaluations import Evaluation
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.observability.summary import best_row
from async_flowrl.policies.registry import ResolvedModel
from async_flowrl.policies.trained_file import save
from async_flowrl.training.checkpoint import read_checkpoint


def export_best(
    config: Config, model: ResolvedModel, directory: RunDirectory, history: Sequence[Evaluation]
) -> Path | None:
    """Writes the weights with which the best version was evaluated to lora_best/ or transformer_best/.

    Returns the folder, or None if no evaluations can be compared. With `trainer.ema_decay` these weights are the moving
    average. Raises DamagedCheckpoint or OSError if the checkpoint of the version cannot be read.
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
    return save(directory.best(config.tune), dict(evaluated), config, model)
