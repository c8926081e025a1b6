"""Every random draw of a run comes from a named seed: `derive(run_seed, "noise", step, group, image)`."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_global_rng = threading.Lock()


def derive(seed: int, *names: int | str) -> int:
    """A 63-bit seed that depends on the run's seed and on the names, and on nothing else."""
    text = "/".join([str(seed), *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int) -> "torch.Generator":
    """A CPU generator: draws are the same whatever device the model runs on."""
    import torch

    return torch.Generator("cpu").manual_seed(seed)


@contextmanager
def untouched_rng(seed: int = 0) -> Iterator[None]:
    """Library code that draws from the global CPU generator draws from `seed` inside; its state is restored outside.

    `torch.manual_seed` would also reseed CUDA. One thread at a time.
    """
    import torch

    with _global_rng:
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(state)
