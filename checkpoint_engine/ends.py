"""The collective transports as the two kinds of workers host them: one end each, opened on the first epoch."""

import torch

from checkpoint_engine.collective import CollectiveReceiver, CollectiveSender
from checkpoint_engine.process_group import Epoch
from checkpoint_engine.publisher import Publisher
from checkpoint_engine.receiver import Receiver
from checkpoint_engine.transports import check_receiver, make_member


class SendingEnd:
    """The first trainer rank's end. Everything but `abort` runs on the publish lane."""

    def __init__(self, publisher: Publisher, device: torch.device) -> None:
        self._publisher, self._device = publisher, device
        self._sender: CollectiveSender | None = None

    def address(self, transport: str, host: str) -> tuple[str, int]:
        if self._sender is None:
            self._sender = CollectiveSender(self._publisher, make_member(transport, self._device), host=host)
        return self._sender.address()

    @property
    def sender(self) -> CollectiveSender:
        if self._sender is None:
            raise RuntimeError("the group's address was never asked for")
        return self._sender

    def abort(self) -> None:
        if self._sender is not None:
            self._sender.abort()


class ReceivingEnd:
    """A rollout worker's end. Everything but `abort` runs on the sync lane."""

    def __init__(self, receiver: Receiver) -> None:
        self._retains = receiver
        self._receiver: CollectiveReceiver | None = None

    def open(self, transport: str, epoch: Epoch, rank: int) -> None:
        """Raises TransferFailed, and ValueError for a transport that can't reach these weights."""
        if self._receiver is None:
            check_receiver(transport, self._retains.device)
            self._receiver = CollectiveReceiver(self._retains, make_member(transport, self._retains.device))
        self._receiver.open(epoch, rank)

    @property
    def receiver(self) -> CollectiveReceiver:
        if self._receiver is None:
            raise RuntimeError("this worker has not joined a group yet")
        return self._receiver

    def abort(self) -> None:
        if self._receiver is not None:
            self._receiver.abort()
