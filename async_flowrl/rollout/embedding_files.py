"""Files of prompt embeddings for `rollout.text_encoder=cached`: one file per prompt, checked on every read.

Its path contains digests of everything that its bits depend on: prompt, text encoder, library versions and device.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save

from async_flowrl.policies.checked import source_digest
from async_flowrl.policies.registry import ResolvedModel
from async_flowrl.types import Asked, Conditioning

logger = logging.getLogger(__name__)

FORMAT = 1
"""Increase it when the format of the files changes, or when code outside a family's own module changes embeddings."""
DIGEST_BYTES = 32
ENCODER_FOLDERS = ("text_encoder", "tokenizer")
"""Prefixes of the names of the model's folders that embeddings depend on."""
PACKAGES = ("torch", "diffusers", "transformers")


class EmbeddingFiles:
    """Reads and writes the embeddings of one text encoder. Several processes may share the folder.

    A file is the SHA-256 (32 bytes) of the rest, followed by a safetensors file, whose metadata has the digest of the
    prompt and the encoder. It is written under a temporary name and renamed, so it is never incomplete.
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

    def path(self, asked: Asked) -> Path:
        """Returns the path of the file for `asked`, whether it exists or not."""
        return self.folder / f"{self._key(asked)}.safetensors"

    def read(self, asked: Asked) -> Conditioning | None:
        """Returns the embeddings of `asked`; None if there is no file, or if it is damaged (this is logged)."""
        path = self.path(asked)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(body).digest() == digest and _made_of(body) == self._key(asked):
            tensors: Conditioning = load(body)
            return {name: tensors[name] for name in sorted(tensors)}
        logger.warning("%s is damaged, or of another prompt or encoder: its embedding is made again", path)
        return None

    def write(self, asked: Asked, conditioning: Conditioning) -> None:
        """Writes the embeddings of `asked`. Raises OSError, which names the file, if they cannot be written."""
        # `save` copies memory as it is, so an array that is not in C order would be read back permuted.
        arrays = {name: np.asarray(array, order="C") for name, array in conditioning.items()}
        body, path = save(arrays, metadata={"made_of": self._key(asked)}), self.path(asked)
        work = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.{id(conditioning)}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            work.write_bytes(hashlib.sha256(body).digest() + body)
            work.replace(path)
        except OSError as error:
            advice = "make room, or set $ASYNC_FLOWRL_CACHE to another folder"
            raise OSError(
                error.errno, f"an embedding cannot be kept ({error.strerror}): {advice}", str(path)
            ) from error
        finally:
            work.unlink(missing_ok=True)

    def _key(self, asked: Asked) -> str:
        wording, system, negative = asked
        return _digest([self._encoder, wording, system, negative])


def encoder_digest(folder: Path, model: ResolvedModel, device: torch.device, *, deterministic: bool) -> str:
    """Returns the hexadecimal SHA-256 of everything, except the prompt, that the bits of an embedding depend on.

    These are the files of text encoders and tokenizers in the model's folder (reading takes about a second per GB), the
    dtype, the longest prompt, the source code of the model family, the versions of PACKAGES, and the device.
    """
    cuda = device.type == "cuda"
    where = torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability()
    packages = {name: version(name) for name in PACKAGES}
    return _digest(
        {
            "format": FORMAT,
            "family": [model.family, source_digest(model.family)],
            "dtype": model.dtype,
            "max_sequence_length": model.max_sequence_length,
            "device": [device.type, where, None if cuda else torch.get_num_threads(), deterministic],
            "packages": packages,
            "files": {str(file.relative_to(folder)): _file_digest(file) for file in _files(folder)},
        }
    )


def _files(folder: Path) -> Iterator[Path]:
    yield folder / "model_index.json"
    for part in sorted(folder.iterdir()):
        if part.is_dir() and part.name.startswith(ENCODER_FOLDERS):
            yield from sorted(file for file in part.rglob("*") if file.is_file())


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _made_of(body: bytes) -> str:
    """Returns the metadata `made_of` of a safetensors file, whose first 8 bytes are the length of its JSON header."""
    length = int.from_bytes(body[:8], "little")
    return str(json.loads(body[8 : 8 + length])["__metadata__"]["made_of"])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode(errors="surrogatepass")).hexdigest()
