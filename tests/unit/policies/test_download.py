"""Tests of downloads from a stand-in for the hub: only needed files, each once, with no second request."""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from async_flowrl.config.hub import download
from async_flowrl.config.schema import ModelConfig, TinyConfig
from async_flowrl.policies.registry import folder_of, load_policy, resolve_model
from async_flowrl.policies.stored import StoredWeights
from async_flowrl.policies.tiny import build_tiny
from tests.support.hub import COMMIT, serving, used_here
from tests.support.ports import free_port

NEVER = (
    "transformer/diffusion_pytorch_model.fp16.safetensors",
    "text_encoder/model.fp16-00001-of-00002.safetensors",
    "text_encoder/pytorch_model.bin",
    "transformer/code.py",
    "everything_in_one.safetensors",
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The tiny model as a repository, beside files that no run needs."""
    folder = tmp_path / "repository"
    shutil.copytree(resolve_model(ModelConfig()).path, folder)
    for name in NEVER:
        (folder / name).write_bytes(b"not needed")
    return folder


def test_every_file_comes_once_and_models_are_loaded_without_asking_the_hub(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, brought = ("structure", "transformer", "all"), []
    with serving({"stand/in": repository}) as hub:
        used_here(monkeypatch, tmp_path / "cache", hub.address)
        model = resolve_model(ModelConfig(path="stand/in"))
        assert model.revision == COMMIT
        for each in parts:
            folder = download(model.path, model.revision, each)
            brought.append(sum(file.is_file() for file in folder.rglob("*.safetensors")))
        asked = list(hub.asked)
        for each in parts:
            load_policy(model, dtype="float32", device="cpu", parts=each)
        weights = StoredWeights(model.path, dtype=torch.float32, revision=model.revision)
        assert "x_embedder.weight" not in weights
        assert hub.asked == asked, "while models were loaded"
        DiffusionPipeline.download(model.path, revision=model.revision, use_safetensors=True)
    assert brought == [0, 1, 3], "weights that structure, transformer and all have brought"
    needed = {str(file.relative_to(repository)) for file in repository.rglob("*") if file.is_file()} - set(NEVER)
    assert len(hub.asked) > len(asked)
    assert hub.fetched() == dict.fromkeys(needed, 1), "diffusers, asked last, finds all of its files as well"


@pytest.fixture
def unreachable_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nobody listens at the hub's address, and nothing may wait: huggingface_hub would, between its retries."""

    def sleep(seconds: float) -> None:
        raise AssertionError(f"it waits {seconds} s")

    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    used_here(monkeypatch, tmp_path / "cache", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr("time.sleep", sleep)
    return tmp_path / "cache"


@pytest.mark.parametrize("parts", ["structure", "transformer"])
def test_a_cached_model_is_loaded_without_the_hub(unreachable_hub: Path, parts: str) -> None:
    stored = unreachable_hub / "models--stand--in"
    snapshot = stored / "snapshots" / COMMIT
    shutil.copytree(build_tiny(TinyConfig()), snapshot)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(COMMIT)
    found = resolve_model(ModelConfig(path="stand/in"))
    assert folder_of(found, parts) == snapshot
    assert load_policy(found, dtype="float32", device="cpu", parts=parts).family == "qwen_image"
