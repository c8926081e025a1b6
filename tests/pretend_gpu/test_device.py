"""Tests of the pretended device: it notices each error that CUDA would punish."""

import pytest
import torch
from pretended import report
from pretended.cuda import Stream

SIZE = 100_000


@pytest.mark.parametrize("recorded", [False, True])
def test_a_buffer_freed_early_is_noticed_and_record_stream_helps(recorded: bool) -> None:
    side, buffer = Stream(), torch.ones(SIZE, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = buffer + 1
    if recorded:
        buffer.record_stream(side)
    del buffer
    torch.zeros(SIZE, device="cuda")
    assert bool(report.seen(report.RACE)) is not recorded
    report.forget()
    assert kept.shape == (SIZE,)


def test_copies_from_and_to_pinned_memory_come_late() -> None:
    source, host = torch.ones(SIZE, device="cuda"), torch.zeros(SIZE, pin_memory=True)
    host.copy_(source, non_blocking=True)
    assert host.eq(0).all()
    torch.cuda.current_stream().synchronize()
    assert host.eq(1).all()
    there = torch.empty(SIZE, device="cuda")
    there.copy_(host, non_blocking=True)
    host.fill_(5)
    assert there.cpu().eq(5).all(), "what the device gets is what lies there when the copy is made"
