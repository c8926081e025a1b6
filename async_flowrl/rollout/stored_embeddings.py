"""The encoder for `rollout.text_encoder=cached`: reads embeddings from files.

For prompts without a file it loads the text encoders, writes the embeddings, and frees the text encoders again.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from async_flowrl.policies.base import Policy
from async_flowrl.policies.loading import ONE_AT_A_TIME
from async_flowrl.policies.one_base import OneBase
from async_flowrl.rollout.embedding_files import EmbeddingFiles
from async_flowrl.rollout.prompts import encode_one
from async_flowrl.types import Asked, Conditioning

logger = logging.getLogger(__name__)


class StoredEmbeddings:
    """Finds or computes embeddings. All workers and runs share the files.

    Whenever the text encoders are loaded for a missing prompt, they also encode the next `ahead` prompts of `upcoming`
    (the prompts that the run needs, in order), so that they are loaded rarely.
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
        """`load` returns a policy with text encoders; it is freed after use. This is worker `worker` of `workers`."""
        self._files, self._load = files, load
        self._upcoming, self._ahead = upcoming, ahead
        self._places = {asked: place for place, asked in enumerate(upcoming)}
        self._worker, self._workers = worker, workers
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context manager around each use of the text encoders, which frees memory on the device for them."""

    def encode(self, asked: Sequence[Asked]) -> list[Conditioning]:
        """Returns the conditioning of each, with the bits of the policy's own encoder. OSError if a write fails."""
        known = {each: self._files.read(each) for each in asked}
        missing = [each for each, conditioning in known.items() if conditioning is None]
        if missing:
            known |= self._visit(missing, self._next(missing))
        return [conditioning for each in asked if (conditioning := known[each]) is not None]

    def begin(self) -> None:
        """Encodes this worker's share of the first `ahead` prompts; call it before the model is on the device."""
        share = self._upcoming[: self._ahead][self._worker :: self._workers]
        if missing := [each for each in share if self._files.read(each) is None]:
            self._visit(missing, ())

    def _next(self, missing: Sequence[Asked]) -> Sequence[Asked]:
        """Returns the next prompts after the missing ones; each worker starts at another place, to share the work."""
        places = [self._places[each] for each in missing if each in self._places]
        if not places:
            return ()
        following = self._upcoming[max(places) + 1 :][: self._ahead]
        start = self._worker * len(following) // self._workers
        return (*following[start:], *following[:start])

    def _visit(self, wanted: Sequence[Asked], more: Sequence[Asked]) -> dict[Asked, Conditioning]:
        """Returns the embeddings of `wanted`, and writes these and those of `more` that have no file yet."""
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
    """Returns cached memory to the device, because other processes may share it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Parked:
    """Moves a network's frozen weights to host memory while other models need the device; `staying` are not moved.

    Another network may share these weights, e.g. that of a trainer rank which is being loaded. Therefore no model is
    loaded by another thread meanwhile (`ONE_AT_A_TIME`): it would move the weights back to the device. On a CPU it does
    nothing.
    """

    def __init__(self, network: nn.Module, device: torch.device, *, staying: Sequence[Tensor]) -> None:
        stay = {id(tensor) for tensor in staying}
        tensors = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
        self._tensors = [tensor for key, tensor in tensors.items() if key not in stay]
        self._device = device

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context manager: inside, the weights are in host memory and the network must not be used."""
        if self._device.type == "cpu":
            yield
            return
        with ONE_AT_A_TIME:
            try:
                for tensor in self._tensors:
                    tensor.data = moved(tensor.data, torch.device("cpu"))
                _free()
                yield
            finally:
                for tensor in self._tensors:
                    tensor.data = moved(tensor.data, self._device)


@contextmanager
def base_aside(base: OneBase, device: torch.device) -> Iterator[None]:
    """Context like `Parked.aside` for a base that has no adapter yet and that perhaps nobody has read yet.

    No other thread reads it inside. On a CPU it does nothing.
    """
    if device.type == "cpu":
        yield
        return
    with ONE_AT_A_TIME:
        read = base.is_read
        with Parked(base.policy.transformer, device, staying=()).aside() if read else nullcontext():
            yield


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to `device`, not through pinned memory, because torch would never free that memory."""
    return tensor.to(device)
