"""Tests of the pretended device: it notices each error that CUDA would punish."""

import pytest
import torch
from pretended import report
from pretended.cuda import Stream
from pretended.nondeterministic import ALWAYS

SIZE = 100_000


def test_tensors_are_on_their_device_and_computed_there() -> None:
    x = torch.randn(64, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    layer = torch.nn.Linear(32, 8).to("cuda")
    layer(x).square().mean().backward()
    assert layer.weight.grad is not None and layer.weight.grad.device == torch.device("cuda", 0)
    reference = torch.nn.functional.linear(x.cpu(), layer.weight.detach().cpu(), layer.bias.detach().cpu())
    assert torch.equal(layer(x).cpu(), reference)


def test_a_tensor_on_another_device_is_refused() -> None:
    a = torch.ones(3, device="cuda:0")
    for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            a + other
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(3, device="cuda:7")
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.randn(3, device="cuda", generator=torch.Generator())


def test_a_tensor_on_the_device_has_no_numpy() -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        torch.ones(3, device="cuda").numpy()


def test_memory_that_nobody_wrote_is_garbage_and_memory_is_counted() -> None:
    before = torch.cuda.memory_allocated()
    empty = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    assert not empty.eq(0).any()
    assert torch.cuda.memory_allocated() - before >= SIZE
    del empty
    assert torch.cuda.memory_allocated() == before


def test_streams_are_ordered_only_by_events() -> None:
    side, source = Stream(), torch.zeros(SIZE, device="cuda")
    with torch.cuda.stream(side):
        source.add_(1)
    assert len(report.seen(report.RACE)) > 0
    report.forget()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        source.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    source.add_(1)
    assert not report.seen(report.RACE)


def test_other_bytes_of_one_buffer_are_no_race() -> None:
    buffer, side = torch.zeros(2 * SIZE, dtype=torch.uint8, device="cuda"), Stream()
    side.wait_stream(torch.cuda.current_stream())
    buffer[:SIZE].fill_(1)
    with torch.cuda.stream(side):
        buffer[SIZE:].fill_(2)
    assert not report.seen(report.RACE)
    with torch.cuda.stream(side):
        buffer[SIZE - 1 :].fill_(2)
    assert report.seen(report.RACE)
    report.forget()


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


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x[torch.tensor([1, 2])],
        lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.equal(x, x),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.current_stream().record_event().synchronize(),
    ],
    ids=["item", "cpu", "nonzero", "mask", "index", "copy", "equal", "device", "stream", "event"],
)
def test_the_host_waiting_is_counted_with_its_place(wait: object) -> None:
    x = torch.ones(4, device="cuda")
    with report.watched(report.SYNC) as waits:
        wait(x)  # type: ignore[operator]
    assert waits.total() >= 1 and "test_device.py" in next(iter(waits)).where
    with report.watched(report.SYNC) as waits:
        (x * 2 + 1).sum().to("cuda", torch.bfloat16)
    assert not waits


def test_an_operator_without_a_deterministic_form_is_refused_where_determinism_is_promised() -> None:
    x = torch.ones(4, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.cumsum(x, 0)
        torch.cumsum(torch.ones(4, dtype=torch.long, device="cuda"), 0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_list_of_operators_names_operators_that_torch_has() -> None:
    for name in ALWAYS:
        assert getattr(torch.ops.aten, name).overloads(), name
