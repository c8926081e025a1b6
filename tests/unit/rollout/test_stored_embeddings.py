"""Tests of embeddings on disk: the bits of the resident encoder; damage is found; new prompts load the encoders."""

import gc
import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies.registry import ResolvedModel, resolve_model
from async_flowrl.rollout import text_encoder as stored_embeddings
from async_flowrl.rollout.text_encoder import (
    DIGEST_BYTES,
    EmbeddingFiles,
    StoredEmbeddings,
    encoder_digest,
)
from async_flowrl.types import Conditioning, EmbeddingKey, EncoderInput

RED: EmbeddingKey = ("red", None, False)
NEGATIVE: EmbeddingKey = ("red", None, True)


@pytest.fixture(autouse=True, scope="module")
def little_to_search() -> None:
    """Whoever frees encoders searches all objects for garbage: those of the tests before these are left out."""
    gc.freeze()


def prompts(count: int) -> list[EmbeddingKey]:
    return [(f"prompt {index}", None, False) for index in range(count)]


class Scribe:
    """A policy that encodes a prompt as its letters, and counts how often it was loaded."""

    def __init__(self) -> None:
        self.loaded, self.encoded = 0, list[EmbeddingKey]()

    def load(self) -> Any:
        self.loaded += 1
        return self

    def encode(
        self, texts: Sequence[EncoderInput], system: str | None = None, *, negative: bool = False
    ) -> list[Conditioning]:
        self.encoded += [(text, system, negative) for text in texts]
        letters = str((*texts, system, negative)).encode()
        return [{"prompt_embeds": np.frombuffer(letters, np.uint8).astype(np.float32)} for _ in texts]


def stored(folder: Path, scribe: Scribe, upcoming: Sequence[EmbeddingKey] = (), **options: Any) -> StoredEmbeddings:
    return StoredEmbeddings(EmbeddingFiles(folder, "e" * 64), scribe.load, upcoming, **options)


def test_what_is_on_disk_is_never_encoded_again(tmp_path: Path) -> None:
    scribe = Scribe()
    first = stored(tmp_path, scribe).encode([RED, NEGATIVE, RED])
    again = stored(tmp_path, scribe).encode([RED, NEGATIVE])
    assert scribe.loaded == 1 and scribe.encoded == [RED, NEGATIVE]
    assert not np.array_equal(first[0]["prompt_embeds"], first[1]["prompt_embeds"])
    for one, other in zip(first, again, strict=False):
        assert other["prompt_embeds"].dtype == np.float32
        assert np.array_equal(one["prompt_embeds"], other["prompt_embeds"])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def foreign(path: Path) -> None:
    """Another prompt's file, which is sound."""
    shutil.copy(next(other for other in path.parent.iterdir() if other != path), path)


@pytest.mark.parametrize("harm", [flip, cut, foreign])
def test_a_damaged_or_foreign_file_is_made_again(
    tmp_path: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    scribe = Scribe()
    (sound, _) = stored(tmp_path, scribe).encode([RED, NEGATIVE])
    path = EmbeddingFiles(tmp_path, "e" * 64).path(RED)
    written = path.read_bytes()
    harm(path)
    (found,) = stored(tmp_path, scribe).encode([RED])
    assert np.array_equal(found["prompt_embeds"], sound["prompt_embeds"])
    assert scribe.encoded == [RED, NEGATIVE, RED] and path.read_bytes() == written
    assert "is damaged, or of another prompt or encoder" in caplog.text
    assert written[:DIGEST_BYTES] == hashlib.sha256(written[DIGEST_BYTES:]).digest()


def test_the_digest_names_all_that_the_bits_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_model(ModelConfig(dtype="float32"))
    folder = tmp_path / "model"
    shutil.copytree(model.path, folder)

    def digest(of: ResolvedModel = model, *, deterministic: bool = True) -> str:
        return encoder_digest(folder, of, torch.device("cpu"), deterministic=deterministic)

    base = digest()
    assert base == digest()
    others = [
        digest(ResolvedModel(model.path, model.family, None, "bfloat16")),
        digest(ResolvedModel(model.path, model.family, None, model.dtype, max_sequence_length=16)),
        digest(deterministic=False),
    ]
    flip(next((folder / "text_encoder").glob("*.safetensors")))
    others.append(digest())
    shutil.copytree(Path(model.path) / "text_encoder", folder / "text_encoder", dirs_exist_ok=True)
    (folder / "tokenizer" / "tokenizer_config.json").write_text("{}")
    others.append(digest())
    with monkeypatch.context() as edited:
        edited.setattr(stored_embeddings, "source_digest", lambda family: f"{family}'s code, edited")
        others.append(digest())
    assert len({base, *others}) == 7
    shutil.copytree(Path(model.path) / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    flip(next((folder / "transformer").glob("*.safetensors")))
    assert digest() == base, "the transformer encodes nothing"
