"""The section `reward` of the configuration: its terms, and the servers that they ask."""

from dataclasses import dataclass, field
from typing import Any

from async_flowrl.config.settings import FREE, NOTHING, setting


@dataclass
class ServeConfig:
    """A server for this reward term, which the run starts, watches and stops."""

    command: Any = None
    """Program and arguments as a text or a list of texts; no shell interprets it. The run replaces {port}, {host} and
    {token_file}. A server with packages of its own begins with `uv run --isolated --no-project --with PACKAGE`."""
    gpus: float = setting(0.0, at_least=0, changes=NOTHING)
    """GPUs of each server, which sees no others; a custom CPU resource takes their place if the cluster has none."""
    replicas: int = setting(1, at_least=1, changes=NOTHING)
    """Servers that the run starts; groups are spread over them."""
    health: str = setting("/health", changes=NOTHING)
    """HTTP path that answers 200 as soon as the server can score."""
    port: int | None = setting(None, at_least=1, at_most=65535, changes=NOTHING)
    """TCP port of the first replica; further replicas take the next ports. null = any free port."""
    start_seconds: float = setting(900.0, above=0, changes=NOTHING)
    """Seconds from the start of a server until it must be healthy; `uv run` installs its packages in this time."""
    restarts: int = setting(3, at_least=0, changes=NOTHING)
    """Restarts of each replica that died or hung. After them it is lost. That ends the run; for a held-out term or one
    with required: false, the other replicas go on, and after the last one the term has no scores."""
    hung_seconds: float = setting(120.0, above=0, infinite=True, changes=NOTHING)
    """Seconds without a 200 from its health path after which a server that was up counts as hung and is restarted. A
    server that cannot answer while it scores needs more than the time of its longest request, or .inf."""
    environment: dict[str, str] = field(default_factory=dict, metadata=FREE)
    """Environment variables of the server; the run replaces {token} in them by the token that its requests carry."""


@dataclass
class RewardTerm:
    """One reward of the sum."""

    weight: float = 1.0
    """Factor on this reward in the sum; a negative one trains against it."""
    name: str | None = None
    """Registered name or `pkg.module:attr`; null = the key under `reward.terms`, or `http` for a term with `serve`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward, e.g. {model: …}; each reward has its own."""
    required: bool = True
    """true: if this term cannot score a group after the retries, reward.on_error decides. false: such a group is
    trained on the sum of its other terms; it is counted and shown, and its scores are stored, so that a resumed run
    has the same."""
    workers: int | None = setting(None, at_least=1, changes=NOTHING)
    """Workers of a pool that scores only this term. A term has its own pool if this setting or one of the next two is
    set; the others are then as in reward.*. All null = the shared pool scores the term."""
    gpus_per_worker: float | None = setting(None, at_least=0, changes=NOTHING)
    """GPUs per worker of the term's own pool; see reward.gpus_per_worker."""
    threads: int | None = setting(None, at_least=1, changes=NOTHING)
    """Torch threads per worker of the term's own pool."""
    serve: ServeConfig | None = None
    """A server that the run starts for this term; null = no server."""


@dataclass
class RewardConfig:
    """The pool that scores images, and the terms of the reward."""

    num_workers: int = setting(1, at_least=1, changes=NOTHING)
    """Reward workers; each scores one group at a time, with all terms that have no pool of their own."""
    gpus_per_worker: float = setting(0.0, at_least=0, changes=NOTHING)
    """GPUs per worker; a fraction such as 0.25 lets four workers share one. A worker with 0 sees no GPU. If the cluster
    has none, a custom CPU resource takes their place. With runtime.backend=local, workers are threads and see all GPUs
    of this process."""
    threads: int = setting(1, at_least=1, changes=NOTHING)
    """Torch threads per worker."""
    environment: dict[str, str] = field(default_factory=dict, metadata=FREE)
    """Environment variables of the pool's processes."""
    terms: dict[str, RewardTerm] = field(default_factory=dict)
    """Name → term; the reward is the weighted sum."""
    on_error: str = setting("fail", choices=("fail", "skip"))
    """If a score is missing after the retries: fail ends the run; skip leaves out the group, which is counted and
    shown. An evaluation does not end the run: missing scores are named, and the exit code is 3."""
    retries: int = setting(3, at_least=0, changes=NOTHING)
    """Retries of a failed term, on the next free worker of its pool; of a pointwise term, image by image."""
    backoff: float = setting(0.5, at_least=0, changes=NOTHING)
    """Seconds before the first retry; doubled each time."""
    concurrency: int = setting(8, at_least=1, changes=NOTHING)
    """Images of a group that a worker scores at the same time with a term that takes one image per call (pointwise). If
    the term fails for an image, only this image is tried again, in the same worker and within deadlines.score."""
