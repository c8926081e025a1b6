"""Tests of `model.path`: accepted and refused values, and equal weights in every process."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from torch._subclasses import FakeTensorMode

from async_flowrl.config.hub import download
from async_flowrl.config.schema import ModelConfig, TinyConfig
from async_flowrl.memory.rehearsal.model import architecture
from async_flowrl.policies.registry import folder_of, load_policy, resolve_model, weights_of
from async_flowrl.policies.stored import StoredWeights, on_meta
from async_flowrl.policies.tiny import build_tiny
from tests.support.hub import COMMIT, serving, used_here
from tests.support.ports import free_port
from tests.support.tiny import tiny_policy
from tests.support.video import build_video


def test_only_this_thread_builds_on_the_meta_device() -> None:
    """Also fake parameters, with which memory is planned."""

    def linear() -> torch.nn.Linear:
        return torch.nn.Linear(2, 2)

    with ThreadPoolExecutor(1) as other, on_meta(torch.bfloat16):
        here, there = linear(), other.submit(linear).result()
        with FakeTensorMode():
            fake = linear()
    assert here.weight.is_meta and here.weight.dtype == torch.bfloat16 and there.weight.device.type == "cpu"
    assert fake.weight.device.type == "meta" and not linear().weight.is_meta


@pytest.mark.parametrize("component", ["transformer", "text_encoder", "vae"])
def test_pickled_weights_are_not_read(tmp_path: Path, component: str) -> None:
    """A pickle can run code when it is read."""
    folder = build_tiny(TinyConfig(), tmp_path)
    (weights,) = (folder / component).glob("*.safetensors")
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    if component == "transformer":
        with pytest.raises(ValueError, match=r"there is no transformer/.*\.safetensors"):
            resolve_model(ModelConfig(path=str(folder), dtype="float32"))
        return
    resolved = resolve_model(ModelConfig(path=str(folder), dtype="float32"))
    with pytest.raises(OSError, match="safetensors"):
        load_policy(resolved, dtype="float32", device="cpu", parts="all")


@pytest.mark.parametrize("family", ["auto", "qwen_image"])
def test_code_in_a_model_folder_is_never_run(tmp_path: Path, family: str) -> None:
    folder, ran = build_tiny(TinyConfig(), tmp_path), tmp_path / "ran"
    (folder / "transformer" / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\nclass Net: pass\n")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"transformer": ["theirs", "Net"]}))
    resolved = resolve_model(ModelConfig(path=str(folder), family=family))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_policy(resolved, dtype="float32", device="cpu", parts="all")
    (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\nclass Pipe: pass\n")
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": ["theirs", "Pipe"]}))
    if family == "auto":
        with pytest.raises(ValueError, match=r"the pipeline of model\.path .*theirs"):
            resolve_model(ModelConfig(path=str(folder)))
    else:
        with pytest.raises(ValueError, match="trust_remote_code"):
            load_policy(resolved, dtype="float32", device="cpu", parts="all")
    assert not ran.exists()


@pytest.mark.extended
def test_two_loads_and_both_parts_give_equal_bits_in_aligned_memory() -> None:
    whole, again, part = tiny_policy(), tiny_policy(), tiny_policy(parts="transformer")
    names = dict(whole.transformer.named_parameters())
    for other in (again, part):
        parameters = dict(other.transformer.named_parameters())
        assert parameters.keys() == names.keys()
        assert all(torch.equal(parameters[name], names[name]) for name in names)
        assert all(parameter.data_ptr() % 64 == 0 for parameter in parameters.values())
        assert not any(parameter.requires_grad for parameter in parameters.values())


def test_the_weights_of_a_family_of_ones_own_are_those_of_its_files(tmp_path: Path) -> None:
    folder = build_video(tmp_path)
    model = resolve_model(ModelConfig(path=str(folder), family="tests.support.video:VideoFamily"))
    files = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {name: tensor.shape for name, tensor in weights_of(model).items()} == {n: t.shape for n, t in files.items()}


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


@pytest.mark.extended
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


@pytest.mark.parametrize("parts", ["structure", "transformer"])
def test_a_cached_model_is_loaded_without_the_hub(parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at the hub's address, and nothing waits: huggingface_hub would, between its retries."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    used_here(monkeypatch, tmp_path, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"it waits {seconds} s"))
    stored = tmp_path / "models--stand--in"
    snapshot = stored / "snapshots" / COMMIT
    shutil.copytree(build_tiny(TinyConfig()), snapshot)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(COMMIT)
    found = resolve_model(ModelConfig(path="stand/in"))
    assert folder_of(found, parts) == snapshot
    assert load_policy(found, dtype="float32", device="cpu", parts=parts).family == "qwen_image"


FILE = "diffusion_pytorch_model.safetensors"


def in_bfloat16(folder: Path, shards: int) -> Path:
    """A tiny model whose transformer is in bfloat16, but for one norm, in so many files with an index."""
    model = Path(shutil.copytree(build_tiny(TinyConfig()), folder / "model"))
    weights = load_file(model / "transformer" / FILE)
    cast = {n: t if n.startswith("norm_out") else t.to(torch.bfloat16) for n, t in weights.items()}
    if shards == 1:
        save_file(cast, model / "transformer" / FILE)
        return model
    (model / "transformer" / FILE).unlink()
    files = {name: f"part-{place % shards}.safetensors" for place, name in enumerate(sorted(cast))}
    for file in set(files.values()):
        save_file({name: cast[name] for name in cast if files[name] == file}, model / "transformer" / file)
    (model / "transformer" / f"{FILE}.index.json").write_text(json.dumps({"weight_map": files}))
    return model


@pytest.mark.parametrize("shards", [1, 3])
def test_most_bytes_decide(shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are often kept in float32. Of a hub's files only the headers are read."""
    model = in_bfloat16(tmp_path, shards)
    assert resolve_model(ModelConfig(path=str(model))).dtype == "bfloat16"
    with serving({"stand/in": model}) as hub:
        used_here(monkeypatch, tmp_path / "cache", hub.address)
        assert resolve_model(ModelConfig(path="stand/in")).dtype == "bfloat16"
    assert sum(".safetensors bytes=0-" in request for request in hub.asked) == shards
    assert not any(file.endswith(".safetensors") for file in hub.fetched())


def test_published_models_are_planned_in_what_their_files_hold() -> None:
    from async_flowrl.config.schema import Config

    config = Config()
    for path, dtype in (("Qwen/Qwen-Image", "bfloat16"), ("Tongyi-MAI/Z-Image-Turbo", "float32")):
        config.model.path = path
        assert architecture(config)[1] == dtype
    config.model.dtype = "bfloat16"
    assert architecture(config)[1] == "bfloat16"
