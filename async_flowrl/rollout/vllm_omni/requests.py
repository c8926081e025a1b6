"""What travels between our side of the engine and vllm-omni's workers."""

from dataclasses import dataclass

from checkpoint_engine import Layout

REQUEST = "rollout_request"
"""Key of the ticket among a request's extra arguments."""
ROLLOUT = "rollout"
"""Metadata group of the answer: {"active": what the network carried, "rollout": images and trajectory}."""


@dataclass(frozen=True)
class AdapterSpec:
    """What every version of a run's adapter has in common."""

    layout: Layout
    streams: tuple[str, ...]
    alpha: float
    rank: int


@dataclass(frozen=True)
class Opening:
    """What a worker is told once, after it has loaded the model; `base` are the shapes of the network's weights."""

    adapter: AdapterSpec
    base: dict[str, tuple[int, ...]]
    dtype: str
    batch_size: int | None
    max_sequence_length: int | None
