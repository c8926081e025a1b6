"""State that a trainer rank gives to its successor, or to any rank that takes its part."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from torch import Tensor

from async_flowrl.training.checkpoint import Checkpoint, digest_of
from async_flowrl.types import Conditioning, Wording
from checkpoint_engine import base_digest


@dataclass(frozen=True)
class PeerState:
    """State of a trainer rank between two optimizer steps, in host memory; the frozen base weights are not in it.

    All ranks have the same. It holds nothing of where a rank sits or of which process it is.
    """

    checkpoint: Checkpoint
    """As it would be written to the disk, without the controller's part and the digest of the weights."""
    negatives: Mapping[Wording, Conditioning]
    """Conditioning of the negative prompts by text."""
    kept: Mapping[tuple[str, int], Tensor]
    """Stream and version → flat copies of versions that an evaluation may still ask for (`Versions.keep`)."""

    def digest(self) -> str:
        """Hex digest of the tensors that decide weights, and of the trainer's counters."""
        kept = base_digest({f"{stream}/{version}": flat for (stream, version), flat in self.kept.items()})
        return sha256(f"{digest_of(self.checkpoint)} {kept}".encode()).hexdigest()
