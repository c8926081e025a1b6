"""Tests of layouts (names, shapes and offsets of a flat buffer) and of digests."""

import hashlib
import pickle
import re

import numpy as np
import pytest
import torch

from checkpoint_engine import Layout, base_digest, weights_digest
from checkpoint_engine.base import Draft
from checkpoint_engine.digest import digest_span
from checkpoint_engine.layout import RunningDigests
from tests.unit.checkpoint_engine.engine_parts import flipped, lora


def test_layout_is_sorted_padded_and_independent_of_order() -> None:
    tensors = lora()
    layout = Layout.of(tensors)
    assert [e.name for e in layout.entries] == sorted(tensors)
    assert all(e.offset % 256 == 0 for e in layout.entries) and layout.nbytes % 256 == 0
    assert Layout.of(dict(reversed(tensors.items()))).hash == layout.hash
    assert pickle.loads(pickle.dumps(layout)).hash == layout.hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("block.1.lora_A.weight"), "block.1.lora_A.weight is missing"),
        (lambda t: t.update({"block.9.x": torch.zeros(1)}), "block.9.x is not expected"),
        (lambda t: t.update({"block.0.lora_B.weight": torch.zeros(2, 2)}), r"block.0.lora_B.weight has shape \[2, 2\]"),
        (lambda t: t.update({"block.2.lora_A.weight": t["block.2.lora_A.weight"].half()}), "lora_A.weight has dtype f"),
    ],
)
def test_difference_names_the_tensor(change, message) -> None:
    other = lora()
    change(other)
    difference = Layout.of(lora()).difference(Layout.of(other))
    assert difference is not None and re.search(message, difference), difference


def test_a_header_travels_in_few_bytes_and_its_layout_is_unpacked_once() -> None:
    """The controller sends one to every receiver with every version; Ray stores what is longer than 100 KiB."""
    names = [f"transformer_blocks.{i}.attn.add_q_proj.lora_{side}.weight" for i in range(1000) for side in "AB"]
    layout = Layout.of(dict.fromkeys(names, torch.empty(64, 4, device="meta")))
    header = Draft("policy", 0, layout, 1.0, 1).sealed((bytes(16),) * len(names))
    sent = pickle.dumps(header)
    came, again = pickle.loads(sent), pickle.loads(sent)
    assert len(sent) < 60_000
    assert came == header and came.is_consistent() and came.layout.hash == layout.hash
    assert came.layout is again.layout


@pytest.mark.parametrize("size", [0, 1, 7, 8, 12, 255, 1 << 18, (1 << 18) + 4, (1 << 19) + 13])
def test_every_single_bit_matters(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    seen = {digest_span(data, 0), digest_span(data, 256)}
    places = sorted({*range(min(size, 16)), *range(max(0, size - 16), size), size // 2} - ({0} if not size else set()))
    changed = [(at, bit) for at in places if at < size for bit in (0, 3, 7)]
    seen |= {digest_span(flipped(data, at, bit), 0) for at, bit in changed}
    assert len(seen) == 2 + len(changed)


def test_digest_is_the_same_on_every_machine() -> None:
    data = (np.arange((1 << 18) + 100) % 251).astype(np.uint8)
    assert digest_span(data, 512).hex() == "812c7ac75b054f472a41e53fb81c5eca"


@pytest.mark.parametrize("step", [1, 7, 256, 1000, 1 << 20])
def test_digests_taken_piece_by_piece_are_those_of_the_whole(step: int) -> None:
    tensors = lora(width=8) | {"half": torch.arange(7, dtype=torch.bfloat16), "none": torch.zeros(0, 3)}
    layout = Layout.of(tensors | {"z": torch.zeros(0)})
    data = np.random.default_rng(1).integers(0, 256, layout.nbytes, dtype=np.uint8)
    running = RunningDigests(layout)
    with pytest.raises(ValueError, match=r"block.0.lora_A.weight is not complete after 0 bytes"):
        running.finish()
    for start in range(0, layout.nbytes, step):
        running.feed(data[start : start + step])
    assert running.end == layout.nbytes
    whole = tuple(digest_span(data[e.offset : e.end], e.offset) for e in layout.entries)
    assert running.finish() == whole == layout.digests(data)


def test_weights_digest_is_sha256_of_float32_in_name_order() -> None:
    tensors = {"b": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "a": torch.tensor([[3.0]])}
    expected = hashlib.sha256(np.array([3.0, 1.0, 2.0], dtype=np.float32).tobytes()).hexdigest()
    assert weights_digest(tensors) == expected


def test_base_digest_sees_names_shapes_dtypes_and_values() -> None:
    tensors = lora()
    digest = base_digest(tensors)
    assert base_digest({k: v.clone() for k, v in reversed(tensors.items())}) == digest
    first = min(tensors)
    variants = [
        tensors | {first: tensors[first].T},
        tensors | {first: tensors[first].reshape(-1)},
        tensors | {first: tensors[first] + 1e-7},
        {k: v for k, v in tensors.items() if k != first},
    ]
    assert len({digest, *map(base_digest, variants)}) == 5
