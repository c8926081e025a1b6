"""Helpers for tests of tune=full: weights of a run before and after training, and a check that all have changed."""

import torch
from safetensors.torch import load_file

from async_flowrl.config.compose import read_config
from async_flowrl.policies.registry import resolve_model
from async_flowrl.policies.stored import StoredWeights
from tests.integration.runs import Run


def base_of(run: Run) -> StoredWeights:
    return StoredWeights(resolve_model(read_config(run.root / "config.yaml").model).path, dtype=torch.float32)


def whole(run: Run) -> dict[str, torch.Tensor]:
    """Returns tensor name → weights that the run has written."""
    return dict(load_file(run.root / "transformer" / "diffusion_pytorch_model.safetensors"))


def check_all_changed_and_delivered(run: Run) -> None:
    """Checks a run of three steps: every parameter was trained, and each of its four versions was sent whole."""
    base, written = base_of(run), whole(run)
    assert written.keys() == base.keys()
    same = {name for name in base if torch.equal(base[name], written[name])}
    assert all(name.startswith("transformer_blocks.1.") for name in same), "dead branches of the last block alone"
    assert len(same) < len(base) / 4
    parameters = sum(tensor.nbytes for tensor in written.values())
    sync = run.summary["sync"]
    assert sync["bytes"] >= 4 * parameters and sync["publishes"] == 4, "versions 0 to 3, each all of it"
    assert len(set(run.digests)) == 4
