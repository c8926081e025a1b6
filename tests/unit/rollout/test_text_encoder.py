"""Tests of text encoders: prompts are encoded once, in batches; offloaded encoders use the device only meanwhile."""

import gc
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies.registry import ResolvedModel, resolve_model
from async_flowrl.rollout import text_encoder
from async_flowrl.rollout.text_encoder import (
    DIGEST_BYTES,
    EmbeddingFiles,
    Offloaded,
    PolicyEncoder,
    Prompts,
    StoredEmbeddings,
    encoder_digest,
)
from async_flowrl.types import Conditioning, EmbeddingKey, EncoderInput


class Tied(nn.Module):
    """Two names for one weight, as T5's embedding has them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.again = nn.Embedding(5, 3), nn.Embedding(5, 3)
        self.again.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(4))


class Scribe:
    """A policy that encodes a prompt as its letters; counts loads, and visits of its encoders to the device."""

    def __init__(self) -> None:
        self.loaded, self.visits, self.inside = 0, 0, False
        self.encoded: list[EmbeddingKey] = []

    def load(self) -> Any:
        self.loaded += 1
        return self

    @contextmanager
    def visit(self) -> Iterator[None]:
        self.visits, self.inside = self.visits + 1, True
        yield
        self.inside = False

    def encode(
        self, texts: Sequence[EncoderInput], system: str | None = None, *, negative: bool = False
    ) -> list[Conditioning]:
        assert self.inside or self.loaded
        self.encoded += [(text, system, negative) for text in texts]
        letters = str((*texts, system, negative)).encode()
        return [{"prompt_embeds": np.frombuffer(letters, np.uint8).astype(np.float32)} for _ in texts]


def test_what_a_ticket_lacks_is_encoded_in_one_visit_and_never_again() -> None:
    visited = Scribe()
    prompts = Prompts(PolicyEncoder(visited, visited.visit))
    first = prompts.embeddings([("red", None, False), (" ", None, True)])
    assert visited.encoded == [("red", None, False), (" ", None, True)] and visited.visits == 1
    assert prompts.embeddings([("red", None, False), (" ", None, True)])[1] is first[1]
    prompts.embeddings([("red", "Be bold.", False), (" ", None, True), ("red", "Be bold.", False)])
    assert visited.encoded[2:] == [("red", "Be bold.", False)] and visited.visits == 2
    prompts.encode_negatives(["green", "blue"])
    assert [text for text, *_ in visited.encoded[3:]] == ["green", "blue"] and visited.visits == 3


def test_the_cache_has_room_for_so_many_bytes_and_forgets_what_was_used_longest_ago() -> None:
    visited = Scribe()
    prompts = Prompts(
        PolicyEncoder(visited, visited.visit), max_bytes=2 * 4 * len(str(("a", None, False)))
    )  # of two prompts
    for text in ("a", "b", "a", "c", "a", "b"):
        prompts.embeddings([(text, None, False)])
    assert [text for text, *_ in visited.encoded] == ["a", "b", "c", "b"]
    assert len(prompts.embeddings([(text, None, False) for text in "defg"])) == 4


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in host memory stands in for the one on a device."""
    monkeypatch.setattr(text_encoder, "upload", lambda tensor, device: tensor.clone())


def places(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}


@pytest.mark.usefixtures("copied")
def test_a_visit_takes_every_weight_to_the_device_and_back_untouched() -> None:
    module = Tied()
    bits = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    offloaded = Offloaded([module], torch.device("cpu"))
    home = places(module)
    with offloaded.visit():
        assert all(place != home[name] for name, place in places(module).items())
        assert module.again.weight is module.embedding.weight
        assert all(torch.equal(tensor, bits[name]) for name, tensor in module.state_dict().items())
        module.embedding.weight.data.zero_()
    assert places(module) == home
    assert all(torch.equal(tensor, bits[name]) for name, tensor in module.state_dict().items())


RED: EmbeddingKey = ("red", None, False)
NEGATIVE: EmbeddingKey = ("red", None, True)


@pytest.fixture(autouse=True, scope="module")
def little_to_search() -> None:
    """Whoever frees encoders searches all objects for garbage: those of the tests before these are left out."""
    gc.freeze()


def stored(folder: Path, scribe: Scribe) -> StoredEmbeddings:
    return StoredEmbeddings(EmbeddingFiles(folder, "e" * 64), scribe.load)


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
        edited.setattr(text_encoder, "source_digest", lambda family: f"{family}'s code, edited")
        others.append(digest())
    assert len({base, *others}) == 7
    shutil.copytree(Path(model.path) / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    flip(next((folder / "transformer").glob("*.safetensors")))
    assert digest() == base, "the transformer encodes nothing"
