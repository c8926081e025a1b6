"""Embeddings that are found on disk; text encoders are loaded only for those that are not, and leave memory again."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from async_flowrl.policies.base import Policy
from async_flowrl.rollout.embedding_files import EmbeddingFiles
from async_flowrl.rollout.prompts import encode_one
from async_flowrl.types import Asked, Conditioning

logger = logging.getLogger(__name__)


class StoredEmbeddings:
    """An encoder for `rollout.text_encoder=cached`.

    When the text encoders are loaded for a prompt that nobody has encoded yet, they also encode the next `ahead` of
    `upcoming`, so that they come once for many. Workers share what their runs and others have put into the folder.
    """

    def __init__(
        self,
        files: EmbeddingFiles,
        load: Callable[[], Policy],
        upcoming: Sequence[Asked] = (),
        *,
        ahead: int = 0,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        """`load` gives a policy that encodes; it is dropped after each visit."""
        self._files, self._load = files, load
        self._upcoming, self._ahead = upcoming, ahead
        self._places = {asked: place for place, asked in enumerate(upcoming)}
        self._worker, self._workers = worker, workers
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        """Makes room on the device for a visit."""

    def encode(self, asked: Sequence[Asked]) -> list[Conditioning]:
        """As the policy's own encoder, bit for bit. Raises OSError where the folder cannot be written."""
        found = {each: self._files.read(each) for each in asked}
        missing = [each for each, conditioning in found.items() if conditioning is None]
        if missing:
            found |= self._visit(missing, self._next(missing))
        return [conditioning for each in asked if (conditioning := found[each]) is not None]

    def begin(self) -> None:
        """Encodes this worker's share of the first `ahead` that come, before there is anything else on the device."""
        share = self._upcoming[: self._ahead][self._worker :: self._workers]
        if missing := [each for each in share if self._files.read(each) is None]:
            self._visit(missing, ())

    def _next(self, missing: Sequence[Asked]) -> Sequence[Asked]:
        """What comes after the last missing prompt; workers that lack the same one begin at different places."""
        places = [self._places[each] for each in missing if each in self._places]
        if not places:
            return ()
        following = self._upcoming[max(places) + 1 :][: self._ahead]
        start = self._worker * len(following) // self._workers
        return (*following[start:], *following[:start])

    def _visit(self, wanted: Sequence[Asked], more: Sequence[Asked]) -> dict[Asked, Conditioning]:
        """Embeddings of `wanted`; those of `more` that nobody has written meanwhile are only written."""
        with self.aside(), self._loaded() as policy:
            made = {}
            for each in wanted:
                made[each] = encode_one(policy, each)
                self._files.write(each, made[each])
            rest = 0
            for each in more:
                if each not in made and not self._files.path(each).exists():
                    self._files.write(each, encode_one(policy, each))
                    rest += 1
        logger.info("text encoders were loaded for %d prompts that were needed, and for %d more", len(made), rest)
        return made

    @contextmanager
    def _loaded(self) -> Iterator[Policy]:
        holder = [self._load()]
        try:
            yield holder[0]
        finally:
            holder.clear()
            _free()


def _free() -> None:
    """Gives what a visit took back to the device: other processes may share it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Parked:
    """Frozen weights of a network that can leave the device for a visit; the adapter stays where it is.

    On a CPU nothing is gained, and nothing moves.
    """

    def __init__(self, network: nn.Module, device: torch.device, *, staying: Sequence[Tensor]) -> None:
        stay = {id(tensor) for tensor in staying}
        tensors = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
        self._tensors = [tensor for key, tensor in tensors.items() if key not in stay]
        self._device = device

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, the network is in host memory and must not be asked for anything."""
        if self._device.type == "cpu":
            yield
            return
        try:
            for tensor in self._tensors:
                tensor.data = moved(tensor.data, torch.device("cpu"))
            _free()
            yield
        finally:
            for tensor in self._tensors:
                tensor.data = moved(tensor.data, self._device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The same bits there. Not through pinned memory, of which torch would keep as much for good."""
    return tensor.to(device)
