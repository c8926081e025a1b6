"""The section `save` of the configuration: checkpoints."""

from dataclasses import dataclass

from async_flowrl.config.settings import setting


@dataclass
class SaveConfig:
    """Checkpoints, which have everything that a resumed run needs."""

    every: int = setting(0, at_least=0)
    """Training steps between checkpoints; 0 = only at the start and at the end."""
    keep: int = setting(2, at_least=1)
    """Newest checkpoints that are kept; older ones are deleted."""
    best: str | None = None
    """Name of a score of evaluations: `reward`, a key of reward.terms or of evaluate.reward.terms. Every evaluated
    version then gets a checkpoint, that of the version with the best score is kept, too, and its weights are written to
    lora_best/ (tune=full: transformer_best/)."""
