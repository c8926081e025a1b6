"""Device memory of a gather: the rows of a rank stay where they are, and no whole version comes to a device."""

import torch

from checkpoint_engine import Layout
from tests.gpu.test_gather import gather, on_gpu
from tests.support.gathered import Ranks

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
