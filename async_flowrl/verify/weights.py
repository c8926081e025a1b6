"""The check of the trained weights: checkpoint, summary, and the last version that was sent."""

from collections.abc import Mapping

import torch
from torch import Tensor

from async_flowrl.training.checkpoint import RANKS, Checkpoint, read_checkpoint
from async_flowrl.training.checkpoint_folder import checkpoint_step, find_checkpoint
from async_flowrl.verify.files import Broken, RunFiles
from checkpoint_engine import Draft, Layout, weights_digest
from checkpoint_engine.digest import joined_digest
from checkpoint_engine.gather import shard_rows


def digests(run: RunFiles) -> str:
    """Checks that the newest checkpoint is undamaged and that its float32 masters have the digest of summary.json.

    Also checks that the last version, as it was sent, is these masters in the dtypes of the network. Returns the
    finding. Raises Broken or DamagedCheckpoint.
    """
    path = find_checkpoint(run.root / "checkpoints")
    if path is None:
        raise Broken("there is no sound checkpoint")
    checkpoint = read_checkpoint(path)
    digest = _masters(checkpoint)
    if digest != checkpoint.trainer["weights_digest"]:
        raise Broken(f"{path.name} holds weights {digest[:16]}, says {checkpoint.trainer['weights_digest'][:16]}")
    if checkpoint_step(path) != run.steps:
        raise Broken(f"the newest sound checkpoint is {path.name}, the run ended at version {run.steps}")
    if digest != run.summary["weights_digest"]:
        raise Broken(f"{path.name} holds weights {digest[:16]}, summary.json says {run.summary['weights_digest'][:16]}")
    for version, sent in checkpoint.controller.get("published", {}).items():
        if {sent} != run.sent.get(("policy", int(version))):
            raise Broken(f"{path.name} names another digest for version {version} than was sent")
    _check_last_version(path.name, checkpoint, run)
    return f"{path.name}: {digest[:16]}"


def _masters(checkpoint: Checkpoint) -> str:
    """Returns the digest of the float32 masters; if each of several ranks has a share, that of their shares."""
    masters, ranks = checkpoint.tensors["weights"], checkpoint.trainer.get(RANKS)
    if ranks is None:
        return weights_digest(masters)
    whole = dict(masters)
    return joined_digest([weights_digest(_share(whole, ranks, rank)) for rank in range(ranks)])


def _share(tensors: Mapping[str, Tensor], ranks: int, rank: int) -> dict[str, Tensor]:
    """Returns the rows of every tensor that `rank` of `ranks` ranks has."""
    rows = {name: shard_rows(len(tensor), ranks, rank) for name, tensor in tensors.items()}
    return {name: tensor[rows[name].start : rows[name].stop] for name, tensor in tensors.items()}


def _check_last_version(name: str, checkpoint: Checkpoint, run: RunFiles) -> None:
    """Raises Broken unless the last version sent is the masters, or the sampling average, in the network's dtypes."""
    version, lora = checkpoint.trainer["version"], checkpoint.trainer["lora"] or {}  # none with tune=full
    prefix = f"{version}/"
    kept = {key.removeprefix(prefix): t for key, t in checkpoint.tensors["retained"].items() if key.startswith(prefix)}
    masters = checkpoint.tensors.get("sampling", checkpoint.tensors["weights"])
    for tensor_name, tensor in kept.items():
        if not torch.equal(tensor, masters[tensor_name].to(tensor.dtype)):
            raise Broken(f"{name}: version {version} is not its masters rounded to {tensor.dtype}, at {tensor_name}")
    layout = Layout.of(kept)
    draft = Draft("policy", version, layout, lora.get("alpha"), lora.get("rank"))
    digest = draft.sealed(layout.digests(layout.packed(kept))).digest
    if {digest} != run.sent.get(("policy", version)):
        raise Broken(f"{name} holds other bytes as version {version} ({digest[:16]}) than were sent")
