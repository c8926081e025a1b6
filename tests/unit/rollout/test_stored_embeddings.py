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
from torch import nn

from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies.registry import ResolvedModel, resolve_model
from async_flowrl.rollout import text_encoder as stored_embeddings
from async_flowrl.rollout.text_encoder import (
    DIGEST_BYTES,
    EmbeddingFiles,
    Parked,
    StoredEmbeddings,
    encoder_digest,
)
from async_flowrl.types import Conditioning, EmbeddingKey, EncoderInput
from tests.support.shared_models import SharedModels
from tests.support.tiny import tiny_policy

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


def test_arrays_come_back_as_they_were_however_they_lay_in_memory(tmp_path: Path) -> None:
    """safetensors writes memory as it lies there, and lists what it reads in an order of the moment."""
    files = EmbeddingFiles(tmp_path, "e" * 64)
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    written = {"transposed": table.T, "every_other": table[:, ::2], "mask": table[0] > 1, "none": table[:0]}
    files.write(RED, written)
    found = files.read(RED)
    assert found is not None and list(found) == sorted(written)
    for name, array in written.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


def test_the_folder_may_be_deleted_at_any_time(tmp_path: Path) -> None:
    scribe = Scribe()
    embeddings = stored(tmp_path, scribe)
    embeddings.encode([RED])
    shutil.rmtree(tmp_path)
    embeddings.encode([RED])
    assert scribe.encoded == [RED, RED] and EmbeddingFiles(tmp_path, "e" * 64).read(RED) is not None


def test_workers_share_out_what_comes_first(tmp_path: Path) -> None:
    scribes = [Scribe(), Scribe()]
    coming = prompts(10)
    workers = [
        stored(tmp_path, scribe, coming, ahead=6, worker=index, workers=2) for index, scribe in enumerate(scribes)
    ]
    for worker in workers:
        worker.begin()
    assert [scribe.encoded for scribe in scribes] == [coming[:6:2], coming[1:6:2]]
    for worker in workers:
        worker.begin()
    workers[0].encode(coming[:6])
    assert [scribe.loaded for scribe in scribes] == [1, 1]


def test_an_encoder_that_is_there_goes_on_with_what_comes_next(tmp_path: Path) -> None:
    scribe, coming = Scribe(), prompts(10)
    embeddings = stored(tmp_path, scribe, coming, ahead=4, worker=1, workers=2)
    embeddings.encode([coming[2]])
    assert scribe.encoded == [coming[2], coming[5], coming[6], coming[3], coming[4]]
    embeddings.encode(coming[2:7])
    assert scribe.loaded == 1
    embeddings.encode([("unforeseen", None, False)])
    assert scribe.loaded == 2 and len(scribe.encoded) == 6


def test_a_visit_ends_when_encoding_fails(tmp_path: Path) -> None:
    class Illiterate(Scribe):
        def encode(self, *_: Any, **__: Any) -> list[Conditioning]:
            raise ValueError("takes prompts as text")

    inside: list[str] = []
    embeddings = stored(tmp_path, Illiterate())

    class Room:
        def __enter__(self) -> None:
            inside.append("in")

        def __exit__(self, *_: object) -> None:
            inside.append("out")

    embeddings.aside = Room  # type: ignore[assignment]
    with pytest.raises(ValueError, match="takes prompts as text"):
        embeddings.encode([RED])
    assert inside == ["in", "out"] and not list(tmp_path.rglob("*.safetensors"))


def test_the_real_encoder_gives_the_bits_of_the_resident_one(tmp_path: Path, shared_models: SharedModels) -> None:
    """Lengths and system prompts mixed; what is loaded for it has neither VAE nor transformer weights."""
    asked: list[EmbeddingKey] = [
        RED,
        NEGATIVE,
        ("a green field under a wide blue sky", None, False),
        ("red", "Be bold.", False),
    ]
    embeddings = StoredEmbeddings(EmbeddingFiles(tmp_path, "e" * 64), lambda: tiny_policy(parts="text"))
    made, read = embeddings.encode(asked), embeddings.encode(asked)
    resident = shared_models.tiny
    for (text, system, negative), one, other in zip(asked, made, read, strict=True):
        (wanted,) = resident.encode([text], system=system, negative=negative)
        assert np.array_equal(one["prompt_embeds"], wanted["prompt_embeds"])
        assert np.array_equal(other["prompt_embeds"], wanted["prompt_embeds"])
    text = tiny_policy(parts="text")
    assert text._whole("encode").vae is None and all(p.is_meta for p in text.transformer.parameters())
    assert not tiny_policy(parts="cached").text_encoders


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


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"text_encoder=cached keeps embeddings in .*set \$ASYNC_FLOWRL_CACHE"):
        EmbeddingFiles(tmp_path / "file", "e" * 64)


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = EmbeddingFiles(tmp_path, "e" * 64)

    def full(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device.*make room, or set \$ASYNC_FLOWRL_CACHE.*safetensors"):
        files.write(RED, {"prompt_embeds": np.zeros(3, np.float32)})
    assert not list(files.folder.iterdir())


def test_a_parked_network_comes_back_untouched_and_its_adapter_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in host memory stand in for a device's."""
    monkeypatch.setattr(stored_embeddings, "moved", lambda tensor, device: tensor.clone())
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).requires_grad_(False)
    network[0].register_buffer("table", torch.arange(3))
    adapter = network[1].weight
    bits = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in network.state_dict().items()}
    with Parked(network, torch.device("cuda"), staying=[adapter]).aside():
        assert [name for name, tensor in network.state_dict().items() if tensor.data_ptr() == places[name]] == [
            "1.weight"
        ]
    assert all(torch.equal(tensor, bits[name]) for name, tensor in network.state_dict().items())
    assert network[1].weight.data_ptr() == places["1.weight"]


def test_a_network_that_could_not_leave_is_back_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    places: dict[int, str] = {}
    network = nn.Linear(3, 3)

    def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" and len(places) == 1:
            raise MemoryError("the host is full")
        places[tensor.data_ptr()] = device.type
        return tensor

    monkeypatch.setattr(stored_embeddings, "moved", moved)
    with pytest.raises(MemoryError), Parked(network, torch.device("cuda"), staying=[]).aside():
        raise AssertionError("there was no room for a visit")
    assert list(places.values()) == ["cuda", "cuda"]
