"""Page-locked memory of the exact size on a GPU: torch takes it for pinned, and copies go both ways. Not run yet."""

import gc

import pytest
import torch

from checkpoint_engine import side_stream
from checkpoint_engine.side_stream import HostCopy, SideStream, forget_error, pinned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.real_gpu,  # a pretended device has no cudaHostRegister
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZE = (64 << 20) + 12345


def test_an_error_of_cuda_is_forgotten() -> None:
    assert int(torch.cuda.cudart().cudaHostUnregister(1)) != 0  # No such memory.
    forget_error()
    torch.ones(1, device="cuda")


def test_memory_of_the_exact_size_is_pinned_and_copied_and_can_be_had_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_stream, "EXACT_FROM_BYTES", SIZE)
    side = SideStream(torch.device("cuda", 0))
    for _ in range(3):
        buffer = pinned(SIZE)
        assert buffer.is_pinned() and buffer[SIZE - 1 :].is_pinned()
        data = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
        there = data.cuda()
        copy = HostCopy(there, buffer, side)
        copy.wait(SIZE)
        assert torch.equal(buffer, data)
        back = buffer.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(back.cpu(), data)
        del buffer, copy
        gc.collect()
