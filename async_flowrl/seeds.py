"""Every random draw of a run comes from a named seed: `derive(run_seed, "noise", step, group, image)`."""

import hashlib

import torch


def derive(seed: int, *names: int | str) -> int:
    """A 63-bit seed that depends on the run's seed and on the names, and on nothing else."""
    text = "/".join([str(seed), *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int) -> torch.Generator:
    """A CPU generator: draws are the same whatever device the model runs on."""
    return torch.Generator("cpu").manual_seed(seed)
