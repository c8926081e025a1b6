"""Device memory and waits of a gather: no whole version comes to a device, and nobody waits for training."""

import torch
from pretended.report import BEHIND, watched

from checkpoint_engine import Layout
from tests.gpu.test_gather import gather, on_gpu
from tests.support.gathered import Ranks, weights

BUCKET = 1 << 16


def test_a_device_holds_no_more_than_its_share_and_two_of_the_larger_of_bucket_and_largest_tensor() -> None:
    tensors = {f"block.{index}": torch.randn(64, 1000, dtype=torch.bfloat16) for index in range(40)}
    made, layout = Ranks(2, tensors, bucket_bytes=BUCKET, alignment=128), Layout.of(tensors)
    flats = on_gpu(made, tensors)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    data = gather(made, 0, flats)
    allowed = 2 * max(BUCKET, *(entry.nbytes for entry in layout.entries))
    assert torch.cuda.max_memory_allocated() - before <= allowed < layout.nbytes / 10
    found = layout.views(data)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_gather_waits_for_nothing_that_was_queued_after_its_version() -> None:
    """Its threads wait for their own copies, not for the training step that follows on the default stream."""
    tensors = weights(0)
    made = Ranks(2, tensors)
    shares = [rank.gather.share(flat) for rank, flat in zip(made.ranks, on_gpu(made, tensors), strict=True)]
    torch.cuda.synchronize()
    training = torch.ones(64, device="cuda").mul_(2.0)
    with watched(BEHIND) as waits:
        list(made.threads.map(lambda rank, share: rank.versions.gather(0, share), made.ranks, shares))
    assert waits == {} and float(training[0]) == 2.0
