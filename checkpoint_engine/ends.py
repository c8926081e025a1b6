"""The ends of collective transports in workers: SendingEnd in trainer rank 0, ReceivingEnd in rollout workers.

Each makes its member of the process group when the first epoch (set of members, see collective.py) is made.
"""

import torch

from checkpoint_engine.collective import CollectiveReceiver, CollectiveSender
from checkpoint_engine.process_group import Epoch
from checkpoint_engine.receiver import Receiver
from checkpoint_engine.sealed import SealedVersions
from checkpoint_engine.transports import check_receiver, make_member


class SendingEnd:
    """The end of trainer rank 0. All methods except `abort` run on the lane (worker thread) for publishing."""

    def __init__(self, publisher: SealedVersions, device: torch.device) -> None:
        self._publisher, self._device = publisher, device
        self.sender: CollectiveSender
        """Set when the group's address is asked for."""

    def address(self, transport: str, host: str) -> tuple[str, int]:
        if not hasattr(self, "sender"):
            self.sender = CollectiveSender(self._publisher, make_member(transport, self._device), host=host)
        return self.sender.address()

    def abort(self) -> None:
        if hasattr(self, "sender"):
            self.sender.abort()


class ReceivingEnd:
    """The end of a rollout worker. All methods except `abort` run on the lane (worker thread) for deliveries."""

    def __init__(self, receiver: Receiver) -> None:
        self._retains = receiver
        self.receiver: CollectiveReceiver
        """Set when the worker joins a group."""

    def open(self, transport: str, epoch: Epoch, rank: int) -> None:
        """Joins a group. Raises TransferFailed; ValueError if the transport cannot write where versions are kept."""
        if not hasattr(self, "receiver"):
            device = self._retains.slot_device
            check_receiver(transport, device)
            self.receiver = CollectiveReceiver(self._retains, make_member(transport, device))
        self.receiver.open(epoch, rank)

    def abort(self) -> None:
        if hasattr(self, "receiver"):
            self.receiver.abort()
