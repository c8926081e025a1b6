"""Helpers for tests of tune=full: weights of a run before and after training, and what its rollout workers received."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

from async_flowrl.cli.verify import verify
from async_flowrl.config.compose import read_config
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.policies.stored import StoredWeights
from async_flowrl.training.checkpoint import read_checkpoint
from async_flowrl.types import EMA, POLICY
from checkpoint_engine import Header, Receiver
from tests.integration.runs import Run


@dataclass
class Received:
    """What the rollout workers of this process have got and computed with, by stream and version."""

    nbytes: dict[int, Counter[tuple[str, int]]] = field(default_factory=dict)
    """By receiver: bytes that were given to it."""
    live: dict[tuple[str, int], dict[str, Tensor]] = field(default_factory=dict)
    """By the network's own names: copies of the live tensors of the receiver that activated the version first."""

    def add(self, receiver: Receiver, stream: str, version: int, nbytes: int) -> None:
        self.nbytes.setdefault(id(receiver), Counter())[stream, version] += nbytes


@contextmanager
def watched_receivers() -> Iterator[Received]:
    """Records what receivers get and activate."""
    found, receive, activate = Received(), Receiver.receive, Receiver.activate

    def received(self: Receiver, header: Header, buffer: Any, slot: str = "ring") -> Any:
        found.add(self, header.stream, header.version, buffer.nbytes)
        return receive(self, header, buffer, slot)

    def activated(self: Receiver, stream: str, version: int, *, slot: str = "ring") -> str:
        digest = activate(self, stream, version, slot=slot)
        if (stream, version) not in found.live:
            found.live[stream, version] = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        return digest

    with mock.patch.object(Receiver, "receive", received), mock.patch.object(Receiver, "activate", activated):
        yield found


def whole(run: Run) -> dict[str, Tensor]:
    """Returns tensor name → weights that the run has written."""
    return dict(load_file(run.root / "transformer" / "diffusion_pytorch_model.safetensors"))


def dead(run: Run) -> set[str]:
    """Returns the names of the parameters that no output of Qwen-Image depends on: of the last block's text stream."""
    config = read_config(run.root / "config.yaml")
    policy = load_policy(resolve_model(config.model), dtype="float32", device="cpu", parts="structure")
    names = [name for name, _ in policy.transformer.named_parameters()]
    unused = {name for name in names if re.fullmatch(str(policy.lora_exclude), name.rpartition(".")[0])}
    return unused | {f"transformer_blocks.{config.model.tiny.layers - 1}.attn.norm_added_q.weight"}


def check_all_changed_and_delivered(run: Run, received: Received) -> None:
    """Checks a run of three steps with an EMA, one step off policy, whose newest three checkpoints are there.

    Every parameter was trained, each of its four versions was received whole, and what rollout workers computed with
    are the masters in the dtype of the network, name by name.
    """
    model = resolve_model(read_config(run.root / "config.yaml").model)
    base, written = StoredWeights(model.path, dtype=torch.float32), whole(run)
    assert written.keys() == base.keys()
    assert {name for name in base if torch.equal(base[name], written[name])} == dead(run), "and nothing else"
    assert run.summary["sync"]["publishes"] == 4 == len(set(run.digests)), "versions 0 to 3"
    check_received(received, sum(tensor.nbytes for tensor in written.values()))
    masters = {0: base, **{version: read_checkpoint(step(run, version)).tensors["weights"] for version in (1, 2, 3)}}
    activated = {version for stream, version in received.live if stream == POLICY and version >= 0}
    assert activated == {0, 1}, "steps 0 to 2 are made with versions 0, 0 and 1"
    for version in activated:
        check_live(received.live[POLICY, version], masters[version])
    check_live(received.live[EMA, 3], written)
    assert run.column("staleness/max") == [0, 1, 1]
    assert max(line["behaviour_gap"] for line in run.metrics) < 1e-6, "rollouts compute with what was trained"
    assert [row for row in verify(run.root) if not row[1]] == []


def step(run: Run, version: int) -> Any:
    return run.root / "checkpoints" / f"step_{version}"


def check_received(received: Received, parameters: int) -> None:
    """Checks that each version came whole and no more than once, to every receiver that still needed it."""
    assert received.nbytes
    for of_receiver in received.nbytes.values():
        for version in (0, 1):
            assert parameters <= of_receiver[POLICY, version] < 1.2 * parameters, "with the padding between tensors"
    for version in (2, 3):
        assert max(of[POLICY, version] for of in received.nbytes.values()) >= parameters


def check_live(live: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
    assert live.keys() == masters.keys()
    for name, tensor in live.items():
        assert torch.equal(tensor, masters[name].to(tensor.dtype)), name
