"""Tests of the vllm_omni engine's parts that do not need vllm: names, shapes, arguments and replies."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.schema import Config, LoraConfig, RewardTerm
from async_flowrl.policies.lora import lora_parameters
from async_flowrl.policies.registry import resolve_model
from async_flowrl.rollout.vllm_omni import settings
from async_flowrl.rollout.vllm_omni.engine import VllmOmniError, metadata, reply
from async_flowrl.rollout.vllm_omni.settings import (
    FAMILIES,
    Names,
    check_installed,
    check_model,
    engine_arguments,
    network_shapes,
    spread_sizes,
    tensor_parallel,
    unpacked,
)
from checkpoint_engine import base_digest
from tests.support.shared_models import SharedModels
from tests.support.tiny import adapted_policy

PACKED = {"to_qkv": ["to_q", "to_k", "to_v"], "add_kv_proj": ["add_q_proj", "add_k_proj", "add_v_proj"]}
NAMES = Names(PACKED, flat=True)
"""As in Qwen-Image."""


def test_only_the_output_projection_is_called_differently() -> None:
    assert NAMES.engine("transformer_blocks.0.attn.to_out.0") == "transformer_blocks.0.attn.to_out"
    assert NAMES.engine("transformer_blocks.0.attn.to_out.0.weight") == "transformer_blocks.0.attn.to_out.weight"
    for same in ("transformer_blocks.0.attn.to_add_out", "transformer_blocks.0.img_mlp.net.0.proj", "a.to_out.01"):
        assert NAMES.engine(same) == same


def test_packed_projections_are_found_by_slice() -> None:
    assert NAMES.slice("b.0.attn.to_k") == ("b.0.attn.to_qkv", 1)
    assert NAMES.slice("b.0.attn.add_v_proj") == ("b.0.attn.add_kv_proj", 2)
    assert NAMES.slice("b.0.attn.to_out.0") == ("b.0.attn.to_out", 0)
    assert Names(PACKED, flat=False).slice("b.0.attn.to_out.0") == ("b.0.attn.to_out.0", 0)
    feed_forward = Names({"w13": ["w1", "w3"]}, flat=False)
    assert [feed_forward.slice(f"layers.0.feed_forward.w{n}") for n in (1, 2, 3)] == [
        ("layers.0.feed_forward.w13", 0),
        ("layers.0.feed_forward.w2", 0),
        ("layers.0.feed_forward.w13", 1),
    ]


def test_adapter_keys_are_those_of_vllms_loader() -> None:
    key = NAMES.key("b.0.attn.to_out.0.lora_A.weight")
    assert key == "base_model.model.transformer.b.0.attn.to_out.lora_A.weight"


def packed_as_the_engine(tensors: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """One rank's share: projections packed per rank, output projections split by input, everything else whole."""
    live: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: NAMES.slice(item[0].rpartition(".")[0])):
        module, _, leaf = name.rpartition(".")
        whole, _ = NAMES.slice(module)
        if whole.rpartition(".")[2] in PACKED:
            parts.setdefault(f"{whole}.{leaf}", []).append(tensor.chunk(ranks)[rank])
        elif ".to_out.0.weight" in name:
            live[NAMES.engine(name)] = tensor.chunk(ranks, dim=1)[rank]
        else:
            live[NAMES.engine(name)] = tensor
    return live | {name: torch.cat(shards) for name, shards in parts.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_base_weights_come_back_from_packing_and_sharding(ranks: int, shared_models: SharedModels) -> None:
    """So their digest is the trainer's."""
    transformer = shared_models.tiny.transformer
    tensors = {name: parameter.detach() for name, parameter in transformer.named_parameters()}
    shards = [packed_as_the_engine(tensors, rank, ranks) for rank in range(ranks)]
    requested: list[int] = []

    def gather(tensor: Tensor, dimension: int) -> Tensor:
        """Every rank asks for its own shard of the same parameter, in the same order."""
        requested.append(dimension)
        others = [find(tensor, shards[0], shard) for shard in shards]
        return torch.cat(others, dim=dimension)

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert base_digest(unpacked(shards[0], shapes, NAMES, gather)) == base_digest(tensors)
    assert bool(requested) == (ranks > 1)


def find(tensor: Tensor, mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """The part of another rank's parameter where `tensor` lies in mine."""
    for name, whole in mine.items():
        if whole.shape[1:] != tensor.shape[1:]:
            continue
        for start in range(0, whole.shape[0] - tensor.shape[0] + 1, tensor.shape[0]):
            if torch.equal(whole[start : start + tensor.shape[0]], tensor):
                return theirs[name][start : start + tensor.shape[0]]
    raise AssertionError("gathered what no rank holds")


def test_a_parameter_that_is_missing_or_misshapen_is_named() -> None:
    with pytest.raises(ValueError, match=r"no parameter for blocks\.0\.weight"):
        unpacked({}, {"blocks.0.weight": (2, 2)}, NAMES, lambda tensor, _: tensor)
    with pytest.raises(ValueError, match=r"holds x\.weight as \[2, 2\], expected \[3, 2\]"):
        unpacked({"x.weight": torch.ones(2, 2)}, {"x.weight": (3, 2)}, NAMES, lambda tensor, _: tensor)


@pytest.mark.parametrize("targets", [None, ["attn.to_q", "attn.to_out.0"]])
def test_the_adapter_and_the_base_have_known_shapes_without_weights(
    targets: list[str] | None, shared_models: SharedModels
) -> None:
    config = Config(lora=LoraConfig(rank=4, targets=targets))
    shapes = network_shapes(config, resolve_model(config.model))
    adapted = lora_parameters(adapted_policy(config=config.lora, parts="transformer").transformer)
    assert shapes.adapter == {name: tuple(parameter.shape) for name, parameter in adapted.items()}
    bare = dict(shared_models.tiny.transformer.named_parameters())
    assert shapes.base == {name: tuple(parameter.shape) for name, parameter in bare.items()}


def test_a_target_that_names_nothing_is_refused_before_the_engine_starts() -> None:
    config = Config(lora=LoraConfig(targets=["attn.to_qq"]))
    with pytest.raises(ValueError, match=r"'attn\.to_qq' names no linear layer"):
        network_shapes(config, resolve_model(config.model))


def test_every_argument_of_the_engine_is_named() -> None:
    config = Config(max_staleness=2)
    config.model.dtype = "bfloat16"
    arguments = engine_arguments(config, folder="/models/qwen", family="qwen_image", ranks=4, port=29501)
    expected = {
        "model": "/models/qwen",
        "dtype": "bfloat16",
        "tensor_parallel_size": 4,
        "max_num_seqs": 1,
        "max_cpu_loras": 5,
        "cache_backend": "none",
        "enforce_eager": True,
    }
    assert expected.items() <= arguments.items()
    pipeline = arguments["custom_pipeline_args"]
    assert pipeline["pipeline_class"].startswith("async_flowrl.rollout.vllm_omni.pipeline.")
    assert pipeline["store_port"] == 29501 and pipeline["family"] == "qwen_image"
    with pytest.raises(ValueError, match=r"generates with qwen_image, sd3, flux, z_image, the model is own:Family"):
        engine_arguments(config, folder="f", family="own:Family", ranks=1, port=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_that_cannot_be_spread_so_is_refused(family: str) -> None:
    """By its configuration alone: these have 6 attention heads, and Z-Image's an MLP of 256 columns."""
    config = Config()
    config.model.tiny.family, config.model.tiny.heads = family, 6
    model = resolve_model(config.model)
    for gpus in (0.5, 1.0, 2.0):
        config.rollout.gpus_per_worker = gpus
        check_model(config, model)
    config.rollout.gpus_per_worker = 4.0
    nearest = "and 256 MLP columns .*nearest: 2" if family == "z_image" else ".*nearest: 3"
    with pytest.raises(ValueError, match=rf"gpus_per_worker=4 spreads the network's 6 attention heads {nearest}$"):
        check_model(config, model)
    config.rollout.gpus_per_worker, config.lora.rank = 1.0, 1024
    with pytest.raises(ValueError, match=r"lora\.rank must be at most 512 with rollout\.engine=vllm_omni, got 1024"):
        check_model(config, model)


def test_the_columns_of_z_images_mlp_are_spread_too() -> None:
    """Two ranks would share its 8 heads; vllm-omni's network refuses the 341 columns, when it is built in a rank."""
    config = Config()
    config.model.tiny.family, config.rollout.gpus_per_worker = "z_image", 2.0
    with pytest.raises(ValueError, match=r"8 attention heads and 341 MLP columns and .*nearest: 1$"):
        check_model(config, resolve_model(config.model))


def test_the_outputs_of_z_image_are_spread_too() -> None:
    """Five ranks would share the heads and the MLP of the published model; vllm-omni's network takes one or two."""
    network = {"n_heads": 30, "dim": 3840, "in_channels": 16, "all_patch_size": [2], "all_f_patch_size": [1]}
    sizes = spread_sizes("z_image", network)
    assert sizes == {"attention heads": 30, "MLP columns": 10240, "outputs per token": 64}
    assert math.gcd(*sizes.values()) == 2


@pytest.mark.parametrize(("gpus", "devices", "size"), [(1.0, 1, 1), (0.5, 1, 1), (2.0, 2, 2), (8.0, 8, 8), (4.0, 0, 1)])
def test_a_workers_devices_are_its_tensor_parallel_size(gpus: float, devices: int, size: int) -> None:
    """On a machine without any, a custom CPU resource stands in and the network stays in one piece."""
    assert tensor_parallel(gpus, devices) == size


def test_devices_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(ValueError, match="gpus_per_worker=4, but the worker sees 2 devices"):
        tensor_parallel(4.0, 2)


def engine_config() -> Config:
    config = Config()
    config.reward.terms = {"color": RewardTerm()}
    config.rollout.engine = "vllm_omni"
    return config


def test_the_configuration_is_refused_where_the_engine_cannot_run() -> None:
    check(engine_config())
    local, shared, split = engine_config(), engine_config(), engine_config()
    local.runtime.backend = "local"
    with pytest.raises(ConfigError, match=r"needs runtime\.backend=ray, got local"):
        check(local)
    shared.placement = "shared"
    with pytest.raises(ConfigError, match="needs placement=separate, got shared"):
        check(shared)
    compiled = engine_config()
    compiled.rollout.compile = True
    with pytest.raises(ConfigError, match=r"^rollout\.compile=true is for rollout\.engine=diffusers"):
        check(compiled)
    split.rollout.gpus_per_worker = 1.5
    with pytest.raises(ConfigError, match=r"tensor parallel size .* whole number, got 1\.5"):
        check(split)
    with pytest.raises(ConfigError, match=r"rollout\.engine=diffusers computes on one GPU and would leave the others"):
        check(replace(split, rollout=replace(split.rollout, engine="diffusers")))


def test_a_missing_or_foreign_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(package: str) -> str:
        raise settings.PackageNotFoundError(package)

    monkeypatch.setattr(settings, "version", none)
    with pytest.raises(ValueError, match=r"needs vllm 0\.30 or 0\.32, which is not installed: pip install"):
        check_installed()
    monkeypatch.setattr(settings, "version", lambda package: "0.30.1" if package == "vllm" else "0.28.0")
    with pytest.raises(ValueError, match=r"needs vllm-omni 0\.30 or 0\.32, found 0\.28\.0"):
        check_installed()
    monkeypatch.setattr(settings, "version", lambda package: "0.30.0" if package == "vllm" else "0.32.0rc1")
    with pytest.raises(ValueError, match=r"of the same release, found vllm 0\.30\.0 and vllm-omni 0\.32\.0rc1$"):
        check_installed()
    for one, other in (("0.30.0", "0.30.0"), ("0.32.0", "0.32.0rc1")):
        monkeypatch.setattr(
            settings, "version", lambda package, one=one, other=other: one if package == "vllm" else other
        )
        check_installed()


def test_an_engine_that_is_not_known_is_refused() -> None:
    config = engine_config()
    config.rollout.engine = "vllm_omny"
    with pytest.raises(ConfigError, match=r"^rollout\.engine must be one of .* did you mean 'vllm_omni'"):
        check(config)


@pytest.mark.parametrize("nested", [["x"], [["x"]], "x", (["x"],)])
def test_one_answer_is_found_however_deep_it_lies(nested: Any) -> None:
    assert reply("method", nested, str) == "x"


FAILURES: Sequence[tuple[Any, str]] = [
    ([{"supported": False, "error": "rank 1: ValueError: wrong"}], "failed in load: rank 1: ValueError: wrong"),
    ([[{"error": "gone"}]], "failed in load: gone"),
    ([{"todo": True, "reason": "no such method"}], "failed in load: no such method"),
    ([], "answered load 0 times"),
    ([["a", "b"]], "answered load 2 times"),
    ([None], "answered load with NoneType, expected str"),
]


@pytest.mark.parametrize(("results", "message"), FAILURES)
def test_a_failed_call_is_an_error_whatever_its_form(results: Any, message: str) -> None:
    with pytest.raises(VllmOmniError, match=message):
        reply("load", results, str)


def test_a_failed_or_foreign_request_is_an_error() -> None:
    def answer(**fields: Any) -> Any:
        """A hand-made output of vllm-omni."""
        return SimpleNamespace(**{"error": None, "multimodal_output": {}} | fields)

    good = answer(multimodal_output={"metadata": {"rollout": {"active": 1}}})
    assert metadata(good, "rollout") == {"active": 1}
    for output, message in [
        (None, "without an answer"),
        (answer(error="out of memory"), "failed in a request: out of memory"),
        (answer(), "without our pipeline's 'rollout'"),
        (answer(multimodal_output=None), "without our pipeline's 'rollout'"),
    ]:
        with pytest.raises(VllmOmniError, match=message):
            metadata(output, "rollout")
