"""Tests of the vllm_omni engine's parts that do not need vllm: names, shapes, arguments and replies."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from async_flowrl.rollout.vllm_omni.engine import VllmOmniError, reply
from async_flowrl.rollout.vllm_omni.engine_settings import Names, Unpacked
from checkpoint_engine import base_digest
from tests.support.shared_models import SharedModels

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
    joined: list[weakref.finalize[..., Any]] = []

    def gather(tensor: Tensor, dimension: int) -> Tensor:
        """Every rank asks for its own shard of one parameter, in the same order; at most two are whole at a time."""
        assert not any(memory.alive for memory in joined[:-1])
        whole = torch.cat([find(tensor, shards[0], shard) for shard in shards], dim=dimension)
        joined.append(weakref.finalize(whole.untyped_storage(), int))
        return whole

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert base_digest(Unpacked(shards[0], shapes, NAMES, gather)) == base_digest(tensors)
    assert bool(joined) == (ranks > 1)


def find(tensor: Tensor, mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """The part of another rank's parameter where `tensor` lies in mine."""
    for name, whole in mine.items():
        if whole.shape[1:] != tensor.shape[1:]:
            continue
        for start in range(0, whole.shape[0] - tensor.shape[0] + 1, tensor.shape[0]):
            if torch.equal(whole[start : start + tensor.shape[0]], tensor):
                return theirs[name][start : start + tensor.shape[0]]
    raise AssertionError("gathered what no rank holds")


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
