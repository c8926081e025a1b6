"""Tests of damaged deliveries: resend, or stop with the tensor's name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_engine import Delivery, DeliveryOptions, Header, Layout, Publisher, Receiver, WeightsMismatch
from checkpoint_engine.digest import ByteArray
from checkpoint_engine.layout import Entry
from tests.support.live import live_digest
from tests.unit.checkpoint_engine.engine_parts import ALPHA, RANK, End, Sender, blank, flipped, lora, resealed, sealed

FIRST, VICTIM, LAST = "block.0.lora_A.weight", "block.1.lora_A.weight", "block.2.lora_B.weight"
Sent = tuple[Header, ByteArray]


def of_other_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Sent], Sent]:
    """What an honest sender of other tensors would send under the same version."""

    def corrupt(sent: Sent) -> Sent:
        tensors = {name: view.clone() for name, view in sent[0].layout.views(torch.from_numpy(sent[1])).items()}
        change(tensors)
        layout = Layout.of(tensors)
        buffer = layout.empty().zero_()
        for name, view in layout.views(buffer).items():
            view.copy_(tensors[name])
        return resealed(sent[0], buffer.numpy(), layout=layout), buffer.numpy()

    return corrupt


def flip(sent: Sent) -> Sent:
    return sent[0], flipped(sent[1], entry(sent[0], VICTIM).offset + 5)


def cut(sent: Sent) -> Sent:
    return sent[0], sent[1][: entry(sent[0], LAST).offset].copy()


def exchange(sent: Sent) -> Sent:
    """The bytes of two tensors of one shape change places on the way."""
    one, other = entry(sent[0], FIRST), entry(sent[0], VICTIM)
    data = sent[1].copy()
    data[one.offset : one.end], data[other.offset : other.end] = (
        sent[1][other.offset : other.end],
        sent[1][one.offset : one.end],
    )
    return sent[0], data


def entry(header: Header, name: str) -> Entry:
    return next(each for each in header.layout.entries if each.name == name)


@dataclass(frozen=True)
class Case:
    """`resent`: a resend cures it; else the run stops."""

    corrupt: Callable[[Sent], Sent]
    message: str
    resent: bool = False


CASES = {
    "flipped bit": Case(flip, f"wrong bytes in {VICTIM}", resent=True),
    "truncation": Case(cut, f"the first tensor cut off is {LAST}", resent=True),
    "two tensors exchanged on the way": Case(exchange, f"wrong bytes in {FIRST}", resent=True),
    "damaged header": Case(
        lambda sent: (replace(sent[0], rank=RANK, digests=(b"\0" * 16,) * len(sent[0].digests)), sent[1]),
        "damaged header",
        resent=True,
    ),
    "missing tensor": Case(of_other_tensors(lambda t: t.pop(LAST)), f"{LAST} is missing"),
    "wrong alpha": Case(lambda sent: (resealed(*sent, alpha=2 * ALPHA), sent[1]), f"alpha 16.0, expected 8.0: {FIRST}"),
    "wrong rank": Case(lambda sent: (resealed(*sent, rank=8), sent[1]), f"rank 8, expected 4: {FIRST}"),
    "stale version": Case(lambda sent: (resealed(*sent, version=sent[0].version - 3), sent[1]), f"is stale.*{FIRST}"),
}


class Faulty(End):
    """A receiver to whom version 2 first comes damaged, header and all; what it acknowledges then looks right."""

    def __init__(self, receiver: Receiver, corrupt: Callable[[Sent], Sent]) -> None:
        super().__init__(receiver, "w-0")
        self.corrupt, self.seen = corrupt, 0
        self.errors: list[BaseException] = []

    async def receive(self, header: Header, payload: Any, slot: str = "ring") -> Any:
        self.seen += header.version == 2
        if header.version != 2 or self.seen > 1:
            return await super().receive(header, payload, slot)
        damaged = self.corrupt((header, payload))
        try:
            ack = self.receiver.receive(*damaged, slot)
        except Exception as error:
            self.errors.append(error)
            raise
        return replace(ack, version=header.version, digest=header.digest)


async def nobody(name: str, error: BaseException) -> None:
    raise AssertionError(name) from error


class Varied(Sender):
    """Every element of every tensor of every version is another one."""

    async def stage(self, version: int) -> None:
        start = 100.0 * version
        for tensor in self.publisher.tensors.values():
            tensor.copy_((torch.arange(tensor.numel()) / 8 + start).reshape(tensor.shape))
            start += 13.0
        self.publisher.stage(version, deadline=0.0)


@pytest.mark.parametrize("name", CASES)
async def test_damage_is_cured_by_a_resend_or_stops_by_name_and_never_goes_live(name: str) -> None:
    """Versions 0 and 1 whole, version 2 damaged once."""
    case, tensors = CASES[name], lora()
    end = Faulty(Receiver(blank(tensors), alpha=ALPHA, rank=RANK), case.corrupt)
    sender = Varied(Publisher(tensors, alpha=ALPHA, rank=RANK))
    delivery, failure = Delivery(sender, replace=nobody, options=DeliveryOptions()), None
    await delivery.join(end)
    try:
        for version in range(3):
            await delivery.publish(version)
            await delivery.drain()
    except WeightsMismatch as error:
        failure = error
    await delivery.close()
    assert len(end.errors) == 1
    with pytest.raises(type(end.errors[0]), match=case.message):
        raise end.errors[0]
    if case.resent:
        assert failure is None and (delivery.stats.retries, delivery.stats.corrupt) == (1, 1)
        digest = sender.publisher.payload(2)[0].digest
        assert end.receiver.activate("policy", 2) == digest == live_digest(end.receiver)
    else:
        assert failure is end.errors[0] and delivery.stats.retries == 0
        assert end.receiver.held() == (("policy", 0, "ring"), ("policy", 1, "ring"))


def test_a_re_pointed_parameter_is_found_at_activation() -> None:
    tensors, live = lora(), blank(lora())
    publisher, receiver = Publisher(tensors, alpha=ALPHA, rank=RANK), Receiver(live, alpha=ALPHA, rank=RANK)
    receiver.receive(*sealed(publisher, 0))
    live[VICTIM].data = live[VICTIM].data.clone()
    with pytest.raises(WeightsMismatch, match=f"{VICTIM} is not bound"):
        receiver.activate("policy", 0)
