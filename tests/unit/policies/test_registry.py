"""Tests of `model.path`: accepted and refused values, and equal weights in every process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_flowrl.config.schema import ModelConfig, TinyConfig
from async_flowrl.policies.registry import load_policy, resolve_model, weights_of
from async_flowrl.policies.tiny import build_tiny
from tests.support.tiny import tiny_policy
from tests.support.video import build_video


def test_a_local_folder_is_resolved_like_tiny(tmp_path: Path) -> None:
    folder = build_tiny(TinyConfig(), tmp_path)
    resolved = resolve_model(ModelConfig(path=str(folder)))
    assert (resolved.path, resolved.family, resolved.revision) == (str(folder), "qwen_image", None)


PIPELINES_OPTIONS = {"device_map": "cpu", "trust_remote_code": False, "use_safetensors": True, "revision": None}


def test_a_rollout_loads_straight_to_its_device_and_only_safetensors(monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers

    seen: list[dict[str, Any]] = []
    load = diffusers.QwenImagePipeline.from_pretrained

    def watched(path: str, **options: Any) -> Any:
        seen.append(options)
        return load(path, **options)

    monkeypatch.setattr(diffusers.QwenImagePipeline, "from_pretrained", watched)
    tiny_policy()
    assert len(seen) == 1 and PIPELINES_OPTIONS.items() <= seen[0].items()


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
