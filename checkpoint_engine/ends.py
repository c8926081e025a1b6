"""The ends of collective transports in workers: SendingEnd in trainer rank 0, ReceivingEnd in rollout workers.

Each makes its member of the process group when the first epoch (set of members, see collective.py) is made.
"""

import torch

from checkpoint_engine.collective import CollectiveReceiver, CollectiveSender
from checkpoint_engine.process_group import Epoch
from checkpoint_engine.publisher import Publisher
from checkpoint_engine.receiver import Receiver
from checkpoint_engine.transports import check_receiver, make_member


class SendingEnd:
    """The end of trainer rank 0. All methods except `abort` run on the lane (worker thread) for publishing."""

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
    """The end of a rollout worker. All methods except `abort` run on the lane (worker thread) for deliveries."""

    def __init__(self, receiver: Receiver) -> None:
        self._retains = receiver
        self._receiver: CollectiveReceiver | None = None

    def open(self, transport: str, epoch: Epoch, rank: int) -> None:
        """Joins a group. Raises TransferFailed; ValueError if the transport cannot write where versions are kept."""
        if self._receiver is None:
            device = self._retains.slot_device
            check_receiver(transport, device)
            self._receiver = CollectiveReceiver(self._retains, make_member(transport, device))
        self._receiver.open(epoch, rank)

    @property
    def receiver(self) -> CollectiveReceiver:
        if self._receiver is None:
            raise RuntimeError("this worker has not joined a group yet")
        return self._receiver

    def abort(self) -> None:
        if self._receiver is not None:
            self._receiver.abort()
