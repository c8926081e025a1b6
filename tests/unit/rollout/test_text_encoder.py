"""Tests of text encoders: prompts are encoded once, in batches; offloaded encoders use the device only meanwhile."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from async_flowrl.rollout import text_encoder
from async_flowrl.rollout.text_encoder import Offloaded, PolicyEncoder, Prompts
from async_flowrl.types import Conditioning, EncoderInput


class Tied(nn.Module):
    """Two names for one weight, as T5's embedding has them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.again = nn.Embedding(5, 3), nn.Embedding(5, 3)
        self.again.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(4))


class Visited:
    """A policy and a residence of its text encoders in one: keeps what was encoded, and in which visit."""

    def __init__(self) -> None:
        self.visits, self.inside = 0, False
        self.encoded: list[tuple[int, EncoderInput, str | None, bool]] = []

    @contextmanager
    def visit(self) -> Iterator[None]:
        self.visits, self.inside = self.visits + 1, True
        yield
        self.inside = False

    def encode(
        self, texts: Sequence[EncoderInput], system: str | None = None, *, negative: bool = False
    ) -> list[Conditioning]:
        assert self.inside
        self.encoded += [(self.visits, text, system, negative) for text in texts]
        return [{"prompt_embeds": np.full(3, len(self.encoded), np.float32)} for _ in texts]


def prompts_of(visited: Any) -> Prompts:
    return Prompts(PolicyEncoder(visited, visited.visit))


def test_what_a_ticket_lacks_is_encoded_in_one_visit_and_never_again() -> None:
    visited = Visited()
    prompts = prompts_of(visited)
    first = prompts.embeddings([("red", None, False), (" ", None, True)])
    assert visited.encoded == [(1, "red", None, False), (1, " ", None, True)]
    assert prompts.embeddings([("red", None, False), (" ", None, True)])[1] is first[1]
    prompts.embeddings([("red", "Be bold.", False), (" ", None, True), ("red", "Be bold.", False)])
    assert visited.encoded[2:] == [(2, "red", "Be bold.", False)] and visited.visits == 2
    prompts.encode_negatives(["green", "blue"])
    assert [text for _, text, *_ in visited.encoded[3:]] == ["green", "blue"] and visited.visits == 3


def test_the_cache_has_room_for_so_many_bytes_and_forgets_what_was_used_longest_ago() -> None:
    visited = Visited()
    prompts = Prompts(PolicyEncoder(visited, visited.visit), max_bytes=2 * 12)  # of two prompts
    for text in ("a", "b", "a", "c", "a", "b"):
        prompts.embeddings([(text, None, False)])
    assert [text for _, text, *_ in visited.encoded] == ["a", "b", "c", "b"]
    assert len(prompts.embeddings([(text, None, False) for text in "defg"])) == 4


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in host memory stands in for the one on a device."""
    monkeypatch.setattr(text_encoder, "upload", lambda tensor, device: tensor.clone())


def places(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}


@pytest.mark.usefixtures("copied")
def test_a_visit_takes_every_weight_to_the_device_and_back_untouched() -> None:
    module = Tied()
    bits = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    offloaded = Offloaded([module], torch.device("cpu"))
    home = places(module)
    with offloaded.visit():
        assert all(place != home[name] for name, place in places(module).items())
        assert module.again.weight is module.embedding.weight
        assert all(torch.equal(tensor, bits[name]) for name, tensor in module.state_dict().items())
        module.embedding.weight.data.zero_()
    assert places(module) == home
    assert all(torch.equal(tensor, bits[name]) for name, tensor in module.state_dict().items())
