"""A rollout worker's text encoders: where they are, and the embeddings of the latest prompts, which it keeps."""

import gc
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.numpy import load, save
from torch import Tensor, nn

from async_flowrl.config.paths import sha256_of, share_file
from async_flowrl.observability.flops import device_kind
from async_flowrl.policies.checked import source_digest
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import ResolvedModel
from async_flowrl.transfers import ONE_AT_A_TIME, upload
from async_flowrl.types import Conditioning, EmbeddingKey, EncoderInput, identity
from checkpoint_engine import Layout


class Offloaded:
    """The text encoders are in host memory (pinned for CUDA) and are copied to the device for each visit."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Moves the modules' weights to host memory. Raises ValueError if there are no modules."""
        if not modules:
            raise ValueError("rollout.text_encoder=offload: this model's policy names no text encoder to offload")
        self._device = device
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._hosted = [tensor.data.cpu() for tensor in self._tensors]
        if device.type == "cuda":
            self._hosted = pinned(self._hosted)
        self._point_to(self._hosted)

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Context manager: copies the weights to the device and frees these copies at the end."""
        self._point_to([upload(tensor, self._device) for tensor in self._hosted])
        try:
            yield
        finally:
            self._point_to(self._hosted)

    def _point_to(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.data = value


def pinned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns contiguous copies in one pinned buffer; shapes and dtypes stay."""
    named = {f"{place:06d}": tensor for place, tensor in enumerate(tensors)}
    layout = Layout.of(named)
    places = layout.views(layout.empty(pinned=True))
    return [places[name].copy_(tensor) for name, tensor in named.items()]


CACHED_BYTES = 2 * 2**30  # Most bytes of embeddings in the cache; the least recently used one is removed first.


class Encoder(Protocol):
    """Returns embeddings: it computes them, or reads them from files."""

    def encode(self, keys: Sequence[EmbeddingKey]) -> list[Conditioning]:
        """Returns the conditioning of each, with the same bits as if the policy had encoded it alone."""


class PolicyEncoder:
    """Computes embeddings with the policy's text encoders, inside `visit`, which has them on the device."""

    def __init__(self, policy: PipelinePolicy, visit: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._policy, self._visit = policy, visit

    def encode(self, keys: Sequence[EmbeddingKey]) -> list[Conditioning]:
        with self._visit():
            return [encode_one(self._policy, key) for key in keys]


def encode_one(policy: PipelinePolicy, key: EmbeddingKey) -> Conditioning:
    """Returns the conditioning of one prompt, encoded alone because others in its batch would change the last bits."""
    text, system, negative = key
    (encoded,) = policy.encode([text], system=system, negative=negative)
    return encoded


class Prompts:
    """The cache. It asks its encoder for all missing embeddings of a ticket in one call."""

    def __init__(self, encoder: Encoder, max_bytes: int = CACHED_BYTES) -> None:
        self._encoder, self._max_bytes, self._bytes = encoder, max_bytes, 0
        self._known: OrderedDict[EmbeddingKey, Conditioning] = OrderedDict()

    def embeddings(self, keys: Sequence[EmbeddingKey]) -> list[Conditioning]:
        """Returns the conditioning of each; the arrays belong to the cache and must not be changed."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._known]
        if missing:
            self._known |= zip(missing, self._encoder.encode(missing), strict=True)
            self._bytes += sum(_nbytes(self._known[key]) for key in missing)
        for key in keys:
            self._known.move_to_end(key)
        found = [self._known[key] for key in keys]
        while self._bytes > self._max_bytes:
            self._bytes -= _nbytes(self._known.popitem(last=False)[1])
        return found

    def encode_negatives(self, texts: Sequence[EncoderInput]) -> list[Conditioning]:
        """Returns the conditioning of negative prompts for the trainer, without keeping them in the cache."""
        return self._encoder.encode([(text, None, True) for text in texts])


def _nbytes(embedded: Conditioning) -> int:
    return sum(array.nbytes for array in embedded.values())


logger = logging.getLogger(__name__)

# Increase it when the format of the files changes, or when code outside a family's own module changes embeddings.
FORMAT = 1
DIGEST_BYTES = 32
# Prefixes of the names of the model's folders that embeddings depend on; the VAE encodes images to edit.
ENCODER_FOLDERS = ("text_encoder", "tokenizer", "processor", "vae")
PACKAGES = ("torch", "diffusers", "transformers")


class EmbeddingFiles:
    """Reads and writes the embeddings of one text encoder. Several processes may share the folder.

    A file is the SHA-256 (32 bytes) of the rest, then safetensors with the digest of prompt and encoder in its
    metadata.
    """

    def __init__(self, folder: Path, encoder: str) -> None:
        """`encoder` is the result of `encoder_digest`. Raises ValueError if the folder cannot be created."""
        self.folder, self._encoder = folder / encoder[:32], encoder
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"rollout.text_encoder=cached keeps embeddings in {self.folder}, which cannot be made "
                f"({error.strerror}): set $ASYNC_FLOWRL_CACHE to a folder that can be written"
            ) from error

    def path(self, key: EmbeddingKey) -> Path:
        return self.folder / f"{self._key(key)}.safetensors"

    def read(self, key: EmbeddingKey) -> Conditioning | None:
        """Returns the embeddings of `key`; None if there is no file, or if it is damaged (this is logged)."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(body).digest() == digest and _made_of(body) == self._key(key):
            tensors: Conditioning = load(body)
            return {name: tensors[name] for name in sorted(tensors)}
        logger.warning("%s is damaged, or of another prompt or encoder: its embedding is made again", path)
        return None

    def write(self, key: EmbeddingKey, conditioning: Conditioning) -> None:
        """Writes the embeddings of `key`. Raises OSError, which names the file, if they cannot be written."""
        # `save` copies memory as it is, so an array that is not in C order would be read back permuted.
        arrays = {name: np.asarray(array, order="C") for name, array in conditioning.items()}
        body, path = save(arrays, metadata={"made_of": self._key(key)}), self.path(key)
        try:
            share_file(path, hashlib.sha256(body).digest() + body)
        except OSError as error:
            advice = "make room, or set $ASYNC_FLOWRL_CACHE to another folder"
            raise OSError(
                error.errno, f"an embedding cannot be kept ({error.strerror}): {advice}", str(path)
            ) from error

    def _key(self, key: EmbeddingKey) -> str:
        wording, system, negative = key
        return _digest([self._encoder, identity(wording), system, negative])


def encoder_digest(folder: Path, model: ResolvedModel, device: torch.device, *, deterministic: bool) -> str:
    """Returns the SHA-256 (hex) of everything, except the prompt, that the bits of an embedding depend on."""
    threads = None if device.type == "cuda" else torch.get_num_threads()
    packages = {name: version(name) for name in PACKAGES}
    return _digest(
        {
            "format": FORMAT,
            "family": [model.family, source_digest(model.family)],
            "dtype": " ".join(filter(None, (model.dtype, model.quantize_text_encoder))),
            "max_sequence_length": model.max_sequence_length,
            "device": [device.type, device_kind(device), threads, deterministic],
            "packages": packages,
            "files": {str(file.relative_to(folder)): sha256_of(file) for file in _files(folder)},
        }
    )


def _files(folder: Path) -> Iterator[Path]:
    yield folder / "model_index.json"
    for part in sorted(folder.iterdir()):
        if part.is_dir() and part.name.startswith(ENCODER_FOLDERS):
            yield from sorted(file for file in part.rglob("*") if file.is_file())


def _made_of(body: bytes) -> str:
    length = int.from_bytes(body[:8], "little")
    return str(json.loads(body[8 : 8 + length])["__metadata__"]["made_of"])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode(errors="surrogatepass")).hexdigest()


class StoredEmbeddings:
    """Finds or computes embeddings; all workers and runs share the files.

    When the text encoders are loaded for a missing prompt, they also encode the next `ahead` prompts of `upcoming`.
    """

    def __init__(
        self,
        files: EmbeddingFiles,
        load: Callable[[], PipelinePolicy],
        upcoming: Sequence[EmbeddingKey] = (),
        *,
        ahead: int = 0,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        """`load` returns a policy with text encoders; it is freed after use. This is worker `worker` of `workers`."""
        self._files, self._load = files, load
        self._upcoming, self._ahead = upcoming, ahead
        self._places = {key: place for place, key in enumerate(upcoming)}
        self._worker, self._workers = worker, workers
        # Context manager around each use of the text encoders, which frees memory on the device for them.
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext

    def encode(self, keys: Sequence[EmbeddingKey]) -> list[Conditioning]:
        """Returns the conditioning of each, with the bits of the policy's own encoder. OSError if a write fails."""
        stored = {key: self._files.read(key) for key in keys}
        missing = [key for key, conditioning in stored.items() if conditioning is None]
        if missing:
            stored |= self._visit(missing, self._next(missing))
        return [conditioning for key in keys if (conditioning := stored[key]) is not None]

    def begin(self) -> None:
        """Encodes this worker's share of the first `ahead` prompts; call it before the model is on the device."""
        share = self._upcoming[: self._ahead][self._worker :: self._workers]
        if missing := [key for key in share if self._files.read(key) is None]:
            self._visit(missing, ())

    def _next(self, missing: Sequence[EmbeddingKey]) -> Sequence[EmbeddingKey]:
        """Returns the next prompts after the missing ones; each worker starts at another place, to share the work."""
        places = [self._places[key] for key in missing if key in self._places]
        if not places:
            return ()
        following = self._upcoming[max(places) + 1 :][: self._ahead]
        start = self._worker * len(following) // self._workers
        return (*following[start:], *following[:start])

    def _visit(self, keys: Sequence[EmbeddingKey], more: Sequence[EmbeddingKey]) -> dict[EmbeddingKey, Conditioning]:
        with self.aside(), self._loaded() as policy:
            computed = {}
            for key in keys:
                computed[key] = encode_one(policy, key)
                self._files.write(key, computed[key])
            rest = 0
            for key in more:
                if key not in computed and not self._files.path(key).exists():
                    self._files.write(key, encode_one(policy, key))
                    rest += 1
        logger.info("text encoders were loaded for %d prompts that were needed, and for %d more", len(computed), rest)
        return computed

    @contextmanager
    def _loaded(self) -> Iterator[PipelinePolicy]:
        with ONE_AT_A_TIME:
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
    """Moves a network's frozen weights, except `staying`, to host memory while other models need the device.

    `network` returns it, or None as long as it is not loaded. A trainer rank which is being loaded may share these
    weights, so no other thread loads a model meanwhile (`ONE_AT_A_TIME`): it would move them back to the device.
    """

    def __init__(
        self, network: Callable[[], nn.Module | None], device: torch.device, *, staying: Sequence[Tensor] = ()
    ) -> None:
        self._network, self._device, self._staying = network, device, {id(tensor) for tensor in staying}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context manager: inside, the weights are in host memory and the network must not be used."""
        if self._device.type == "cpu":
            yield
            return
        with ONE_AT_A_TIME:
            network = self._network()
            parts = () if network is None else (*network.parameters(), *network.buffers())
            tensors = {id(tensor): tensor for tensor in parts if id(tensor) not in self._staying}.values()
            try:
                for tensor in tensors:
                    tensor.data = tensor.data.to("cpu")  # Not to pinned memory, which torch would never free.
                _free()
                yield
            finally:
                for tensor in tensors:
                    tensor.data = tensor.data.to(self._device)
