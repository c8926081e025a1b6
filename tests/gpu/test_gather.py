"""Gathers of shares that lie on GPUs: nothing is read before it is there."""

import pytest
import torch

from checkpoint_engine import Receiver
from tests.support.gathered import SHAPES, Ranks, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VERSIONS = 4


def on_gpu(ranks: Ranks, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [rank.flat(tensors).to("cuda", non_blocking=True) for rank in ranks.ranks]


def gather(ranks: Ranks, version: int, flats: list[torch.Tensor]) -> torch.Tensor:
    """Gathers in a thread of each rank what the calling thread has queued; returns the bytes of the first rank."""
    shares = [rank.gather.share(flat) for rank, flat in zip(ranks.ranks, flats, strict=True)]
    list(ranks.threads.map(lambda rank, share: rank.versions.gather(version, share), ranks.ranks, shares))
    return torch.from_numpy(ranks.ranks[0].versions.payload(version)[1])


@pytest.mark.parametrize("on_host", [False, True], ids=["ring on the device", "ring in pinned memory"])
def test_rows_are_gathered_as_they_are_when_the_version_is_made(on_host: bool) -> None:
    """A pretended device reports a race, also with the host."""
    made = Ranks(2, weights(0))
    live = {name: torch.zeros(shape, device="cuda") for name, shape in SHAPES.items()}
    receiver = Receiver(live, capacity=1, on_host=on_host)
    for version in range(VERSIONS):
        gather(made, version, on_gpu(made, weights(version)))
        header, data = made.ranks[0].versions.payload(version)
        receiver.receive(header, data)
        assert receiver.activate("policy", version) == header.digest
    assert all(torch.equal(live[name].cpu(), tensor) for name, tensor in weights(VERSIONS - 1).items())
