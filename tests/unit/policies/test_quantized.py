"""Tests of the quantised base: its formats, its layers in every family, and the copy of it that a node keeps."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from async_flowrl.config.schema import LoraConfig, ModelConfig, TinyConfig
from async_flowrl.policies import quantizer
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.quantized_layer import FORMATS, QuantizedLinear, quantize
from async_flowrl.policies.registry import ResolvedModel, keep_copy, load_policy, resolve_model, weights_of
from async_flowrl.policies.stored import StoredWeights
from async_flowrl.policies.tiny import build_tiny
from async_flowrl.policies.tuning import LoraTuning
from checkpoint_engine import base_digest
from tests.support.failing_disk import Torn, failing_disk
from tests.support.families import TWO_AND_SLOW, conditioning, how, latents

BITS = {"int8": 8.0, "fp8": 8.0, "int4": 4.25, "nf4": 4.25}
"""Of a weight in a large bfloat16 layer, without the share of a row's one scale."""
ERROR = {"int8": 0.009, "fp8": 0.028, "int4": 0.1, "nf4": 0.097}
"""Most relative error of normally distributed weights."""


class Block(nn.Module):
    def __init__(self, columns: int, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"to_q": nn.Linear(columns, rows)})])
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.layer.weight.normal_(0.0, columns**-0.5, generator=generator)
        self.requires_grad_(False).to(dtype)

    @property
    def layer(self) -> Any:
        return self.blocks[0].get_submodule("to_q")


def decoded(layer: QuantizedLinear) -> Tensor:
    return FORMATS[layer.format].decode(layer.weight, layer.scale, layer.table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_a_layer_is_small_near_its_weights_and_keeps_no_others(name: str, dtype: torch.dtype) -> None:
    network = Block(1024, 256, dtype)
    weight = network.layer.weight.float().clone()
    quantize(network, name)
    layer = network.layer
    assert isinstance(layer, QuantizedLinear) and layer.weight.dtype == torch.int8
    assert 0.001 < float((decoded(layer).float() - weight).norm() / weight.norm()) < ERROR[name]
    if dtype == torch.bfloat16:
        assert 8 * (layer.weight.nbytes + layer.scale.nbytes) / weight.numel() == pytest.approx(BITS[name], abs=0.02)
    kept: list[Tensor] = []
    inputs = [torch.randn(2, 8, 1024, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2)]
    x, y = (each.requires_grad_() for each in inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = layer(x)
    assert max(tensor.nbytes for tensor in kept) <= layer.weight.nbytes
    expected = nn.functional.linear(y, decoded(layer), layer.bias)
    assert torch.equal(out, expected)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
    out.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("name", ["int4", "nf4"])
def test_the_sixteen_values_are_stored_exactly(name: str) -> None:
    form = FORMATS[name]
    values = form.table(torch.float32)[:16, 1]
    weight = torch.stack([values.repeat(4), 3.0 * values.repeat(4), torch.zeros(64)])
    codes, scale = form.encode(weight, torch.float32)
    assert torch.equal(form.decode(codes, scale, form.table(torch.float32)), weight)
    assert len(set(codes[0].view(torch.uint8).tolist())) == 8


def resolved(family: str = "qwen_image", **settings: Any) -> ResolvedModel:
    return resolve_model(ModelConfig(tiny=TinyConfig(family=family, layers=2), **settings))


def loaded(model: ResolvedModel, parts: str) -> PipelinePolicy:
    policy = load_policy(model, dtype=model.dtype, device="cpu", parts=parts)
    assert isinstance(policy, PipelinePolicy)
    return policy


def velocity(policy: PipelinePolicy) -> Tensor:
    positive, _ = conditioning(policy)
    return policy.velocity(latents(policy, 2), torch.tensor([0.9, 0.4]), positive, None, how(policy.family))


@pytest.mark.parametrize("family", TWO_AND_SLOW)
def test_every_process_of_every_family_has_the_same_bits(family: str) -> None:
    model = resolved(family, quantize="nf4")
    sampling, training = loaded(model, "all"), loaded(model, "transformer")
    digests = {base_digest(dict(each.transformer.named_parameters())) for each in (sampling, training)}
    digests.add(base_digest(weights_of(model), set(dict(training.transformer.named_parameters()))))
    assert len(digests) == 1
    assert loaded(model, "structure").transformer.state_dict().keys() == weights_of(model).keys()
    quantized, plain = velocity(sampling), velocity(loaded(resolved(family), "all"))
    assert 1e-4 < float((quantized - plain).norm() / plain.norm()) < 0.3
    tuning = LoraTuning(LoraConfig(4, 8.0))
    tuning.attach(training, 0)
    layers = training.transformer.named_modules()
    assert any(isinstance(getattr(layer, "base_layer", None), QuantizedLinear) for _, layer in layers)
    assert {parameter.dtype for parameter in tuning.parameters(training.transformer).values()} == {torch.float32}
    assert set(tuning.dtypes(training.transformer).values()) == {torch.float32}


@pytest.mark.parametrize("family", TWO_AND_SLOW)
@pytest.mark.extended
def test_text_encoders_are_quantised_alike_wherever_they_are(family: str) -> None:
    """Also as those that are loaded from their own files and then quantised."""
    model, here = resolved(family, quantize_text_encoder="int8"), loaded(resolved(family), "all")
    (exact,) = here.encode(["a red ball"])
    for encoder in here.text_encoders:
        quantize(encoder, "int8")
    (one,), (other,), (same,) = (
        policy.encode(["a red ball"]) for policy in (loaded(model, "all"), loaded(model, "text"), here)
    )
    assert all((one[name] == other[name]).all() and (one[name] == same[name]).all() for name in one)
    assert any((one[name] != exact[name]).any() for name in one)
    network = loaded(model, "all").transformer
    assert not any(isinstance(layer, QuantizedLinear) for layer in network.modules())


def test_random_weights_are_quantised_without_a_copy(cache: Path) -> None:
    model = resolved(weights="random", quantize="int8")
    one, other = (loaded(model, parts).transformer for parts in ("all", "transformer"))
    assert base_digest(dict(one.named_parameters())) == base_digest(dict(other.named_parameters()))
    assert base_digest(weights_of(model)) == base_digest(one.state_dict())
    assert not (cache / "quantized").exists()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def local(tmp_path: Path) -> ModelConfig:
    folder = shutil.copytree(build_tiny(TinyConfig(layers=1, heads=2)), tmp_path / "model")
    return ModelConfig(path=str(folder), quantize="int4")


@pytest.mark.parametrize("spoil", ["torn", "full"])
def test_a_copy_is_whole_or_made_again(spoil: str, cache: Path, local: ModelConfig) -> None:
    """The process ends, or the disk is full, at each fsync and rename of the copy in turn: two files, then a folder."""
    model = resolve_model(local)
    for at in range(1, 6):
        with pytest.raises(Torn if spoil == "torn" else ValueError), failing_disk(spoil, at=at):
            weights_of(model)
        assert not [each for each in (cache / "quantized").iterdir() if not each.name.startswith(".")]
    whole = base_digest(weights_of(model))
    left = [each.name for each in (cache / "quantized").iterdir() if each.is_dir()]
    assert len(left) == 1 and not left[0].startswith(".")
    shutil.rmtree(cache)
    assert base_digest(weights_of(model)) == whole


def test_a_byte_of_a_copy_that_changed_on_the_disk_is_found(cache: Path, local: ModelConfig) -> None:
    model = resolve_model(local)
    whole, (file,) = base_digest(weights_of(model)), (cache / "quantized").glob("*/transformer/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=str(file)):
        loaded(model, "transformer")
    shutil.rmtree(file.parent.parent)
    loaded(model, "transformer")
    assert base_digest(weights_of(model)) == whole


def test_processes_at_once_write_one_copy(cache: Path, local: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    replace_file = quantizer.replace_file
    monkeypatch.setattr(quantizer, "replace_file", lambda path, data: written.append(path) or replace_file(path, data))
    network = loaded(resolve_model(ModelConfig(local.path)), "structure").transformer
    stored = quantizer.QuantizedWeights(StoredWeights(local.path, dtype=torch.float32), network, "nf4", torch.float32)
    with ThreadPoolExecutor(4) as pool:
        (folder,) = set(pool.map(lambda _: quantizer.kept_base(stored, "test"), range(4)))
    assert len(written) == 2 and folder.parent == cache / "quantized"


def test_a_node_keeps_what_its_processes_read(cache: Path, local: ModelConfig) -> None:
    model = resolve_model(replace(local, quantize_text_encoder="nf4"))
    folders: list[set[str]] = []
    for parts in ("transformer", "all", "all"):
        keep_copy(model, parts)
        folders.append({each.name for copy in (cache / "quantized").iterdir() for each in copy.glob("*")})
    assert folders == [{"transformer"}, *[{"transformer", "text_encoder"}] * 2]


@pytest.mark.extended
def test_other_files_other_settings_and_another_dtype_are_other_copies(cache: Path, local: ModelConfig) -> None:
    digests = [base_digest(weights_of(resolve_model(local)))]
    for change in ({"quantize": "nf4"}, {"dtype": "bfloat16"}):
        model = resolve_model(replace(local, **change))
        digests.append(base_digest(weights_of(model)))
    (file,) = Path(local.path, "transformer").glob("*.safetensors")
    shutil.copyfile(build_tiny(TinyConfig(layers=1, heads=2, seed=7)) / "transformer" / file.name, file)
    digests.append(base_digest(weights_of(resolve_model(local))))
    assert len(set(digests)) == 4
