"""Tests of `model.path`: accepted and refused values, and equal weights in every process."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from async_flowrl.config.models import not_found
from async_flowrl.config.schema import ModelConfig, TinyConfig
from async_flowrl.policies.base import Shapes
from async_flowrl.policies.qwen_image import QwenImageFamily
from async_flowrl.policies.registry import load_family, load_policy, resolve_model, shapes_of
from async_flowrl.policies.stored import FILE
from async_flowrl.policies.tiny import build_tiny
from async_flowrl.transfers import settle
from tests.support.hub import COMMIT, used_here
from tests.support.tiny import RED, tiny_policy


def test_a_local_folder_is_resolved_like_tiny(tmp_path: Path) -> None:
    folder = build_tiny(TinyConfig(), tmp_path)
    resolved = resolve_model(ModelConfig(path=str(folder)))
    assert (resolved.path, resolved.family, resolved.revision) == (str(folder), "qwen_image", None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(path="tinny"), "model.path 'tinny' was not found: no such folder; did you mean 'tiny'?"),
        (
            ModelConfig(dtype="bfloat"),
            "model.dtype must be one of auto, bfloat16, float32, got 'bfloat'; did you mean 'bfloat16'?",
        ),
        (
            ModelConfig(family="qwen_imge"),
            "model.family must be one of auto, flux, qwen_image, sana, sd3, z_image, got 'qwen_imge'; did you mean",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_match(config: ModelConfig, message: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve_model(config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


class Outer:
    class Family(QwenImageFamily):
        pass


def test_a_family_may_stand_in_a_class() -> None:
    assert isinstance(load_family(f"{__name__}:Outer.Family"), Outer.Family)


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


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_missing_file_of_several_and_a_mere_variant_are_refused_before_anything_starts(
    tmp_path: Path, dtype: str
) -> None:
    folder = build_tiny(TinyConfig(), tmp_path)
    (weights,) = (folder / "transformer").glob("*.safetensors")
    named = {"weight_map": {"a": weights.name, "b": "diffusion_pytorch_model-00002-of-00002.safetensors"}}
    index = folder / "transformer" / f"{FILE}.index.json"
    index.write_text(json.dumps(named))
    with pytest.raises(ValueError, match="there is no transformer/diffusion_pytorch_model-00002-of-00002"):
        resolve_model(ModelConfig(path=str(folder), dtype=dtype))
    index.unlink()
    weights.rename(weights.with_name("diffusion_pytorch_model.fp16.safetensors"))
    with pytest.raises(ValueError, match=r"variants such as diffusion_pytorch_model\.fp16"):
        resolve_model(ModelConfig(path=str(folder), dtype=dtype))


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


def test_a_misspelt_folder_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    with pytest.raises(ValueError, match=r"no such folder; did you mean '.*/my-model'"):
        resolve_model(ModelConfig(path=str(tmp_path / "my-modell")))


def test_folders_that_are_not_pipelines_of_a_known_family_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no model_index\.json"):
        resolve_model(ModelConfig(path=str(tmp_path)))
    for newer in ("QwenImage21Pipeline", "FluxKontextPipeline", "Flux2Pipeline", "WanPipeline"):
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": newer}))
        with pytest.raises(ValueError, match=rf"no model family yet: .*extending/model\.md .* got '{newer}'$"):
            resolve_model(ModelConfig(path=str(tmp_path)))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "QwenImagePipelin"}))
    with pytest.raises(ValueError, match="got 'QwenImagePipelin'; did you mean 'QwenImagePipeline'"):
        resolve_model(ModelConfig(path=str(tmp_path)))


def test_a_hub_name_takes_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub cache as a download leaves it: the commit is recorded and the weights are loaded from it."""
    repository, here = tmp_path / "models--Someone--Their-Image", build_tiny(TinyConfig())
    shutil.copytree(here, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    used_here(monkeypatch, tmp_path)
    resolved = resolve_model(ModelConfig(path="Someone/Their-Image"))
    assert (resolved.path, resolved.family, resolved.revision) == ("Someone/Their-Image", "qwen_image", COMMIT)
    policy = load_policy(resolved, dtype="float32", device="cpu", parts="transformer")
    assert policy.latent_shape(32)[0] == 4
    stored = load_file(here / "transformer/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(weight, stored[name]) for name, weight in policy.transformer.named_parameters())
    with pytest.raises(ValueError, match=r"^model\.path 'Qwen/Qwen-Imag' was not found: .*did you mean 'Qwen/Qwen-Im"):
        resolve_model(ModelConfig(path="Qwen/Qwen-Imag"))


def test_two_loads_and_both_parts_give_equal_bits_in_aligned_memory() -> None:
    whole, again, part = tiny_policy(), tiny_policy(), tiny_policy(parts="transformer")
    names = dict(whole.transformer.named_parameters())
    for other in (again, part):
        parameters = dict(other.transformer.named_parameters())
        assert parameters.keys() == names.keys()
        assert all(torch.equal(parameters[name], names[name]) for name in names)
        assert all(parameter.data_ptr() % 64 == 0 for parameter in parameters.values())
        assert not any(parameter.requires_grad for parameter in parameters.values())


def test_a_trainer_process_has_no_text_encoder_and_no_vae() -> None:
    policy = tiny_policy(parts="transformer")
    with pytest.raises(RuntimeError, match="only the transformer and cannot encode prompts"):
        policy.encode([RED.text])
    with pytest.raises(RuntimeError, match="only the transformer and cannot decode images"):
        policy.decode(torch.zeros(1, 4, 64), 32)
    with pytest.raises(
        ValueError, match="parts must be one of all, cached, offload, structure, text, transformer, got 'vae'"
    ):
        load_policy(resolve_model(ModelConfig()), dtype="float32", device="cpu", parts="vae")


def test_weights_in_unaligned_memory_are_moved_to_aligned_memory() -> None:
    """As memory-mapped files leave them: there, matrix products round differently."""
    layer = nn.Linear(16, 16)
    original = layer.weight.data.clone()
    shifted = torch.empty(16 * 16 + 10)[10:].view(16, 16)
    layer.weight.data = shifted.copy_(original)
    assert layer.weight.data_ptr() % 64 != 0
    settle(layer, torch.device("cpu"))
    assert layer.weight.data_ptr() % 64 == 0
    assert torch.equal(layer.weight, original)
    assert not layer.training and not layer.weight.requires_grad


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("Qwen/Qwen-Imagee", "'Qwen/Qwen-Image'"),
        ("Qwen/Qwen-Image-Edit", None),
        ("black-forest-labs/FLUX.2-dev", None),
        ("stabilityai/stable-diffusion-3.5-large-turbo", None),
    ],
)
def test_another_model_of_the_hub_is_no_typing_error(given: str, hint: str | None) -> None:
    said = not_found(given, "the hub cannot be reached")
    assert said.endswith(f"did you mean {hint}?") if hint else "did you mean" not in said


def test_a_family_of_another_network_is_refused_by_name(tmp_path: Path) -> None:
    folder = build_tiny(TinyConfig(family="sd3"), tmp_path)
    with pytest.raises(
        ValueError, match=r"^model\.family=flux is for FluxTransformer2DModel, .* SD3Transformer2DModel"
    ):
        resolve_model(ModelConfig(path=str(folder), family="flux"))
    assert resolve_model(ModelConfig(path=str(folder), family="sd3")).family == "sd3"


@pytest.mark.parametrize(
    ("family", "most"), [("sd3", 512), ("flux", 512), ("qwen_image", 1024), ("z_image", 224), ("sana", None)]
)
def test_longer_prompts_than_the_pipeline_takes(family: str, most: int | None) -> None:
    def shapes(tokens: int) -> Shapes:
        model = ModelConfig(tiny=TinyConfig(family=family), max_sequence_length=tokens)
        return shapes_of(resolve_model(model), 32)

    assert shapes(most or 4096).conditioning
    if most is not None:
        with pytest.raises(ValueError, match=rf"^model\.max_sequence_length must be at most {most} for .*, got 4096"):
            shapes(4096)
