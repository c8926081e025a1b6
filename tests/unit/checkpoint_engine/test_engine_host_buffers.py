"""Tests of payload memory: reused only after its last reader, and freed with its owner."""

import torch

from checkpoint_engine.digest import ByteArray
from checkpoint_engine.layout import Layout
from checkpoint_engine.publisher import HostBuffers
from tests.unit.checkpoint_engine.engine_parts import lora


def address(data: ByteArray) -> int:
    return int(data.__array_interface__["data"][0])


def test_a_buffer_comes_back_when_its_last_reader_lets_go() -> None:
    buffers = HostBuffers(Layout.of(lora()))
    first = buffers.take()
    place, kept = address(first.data), torch.from_numpy(first.data[8:16])
    del first
    second = buffers.take()
    assert address(second.data) != place, "a tensor made of a slice of it still reads it"
    del kept
    assert address(buffers.take().data) == place
