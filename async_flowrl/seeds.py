"""Seeds of a run: every random draw has its own seed, derived from a configured seed and from names.

Example: `generator(derive(config.seed, "noise", step, group, image))`. Draws thus do not depend on order or timing.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_global_rng = threading.Lock()


def derive(seed: int, *names: int | str) -> int:
    """Seed in 0 .. 2**63 - 1 from the run's `seed` and `names`; equal arguments give equal seeds on every machine."""
    text = "/".join([str(seed), *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int) -> "torch.Generator":
    """New torch generator on the CPU with this seed, so that draws do not depend on the model's device."""
    import torch

    return torch.Generator("cpu").manual_seed(seed)


@contextmanager
def untouched_rng(seed: int = 0) -> Iterator[None]:
    """Context: seeds torch's global CPU generator, for library code that takes none, and restores it at the end.

    Generators of CUDA are not touched. A second thread waits until the first one has left.
    """
    import torch

    with _global_rng:
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(state)
