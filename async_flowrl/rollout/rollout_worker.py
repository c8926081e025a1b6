"""The rollout worker: an engine with a receiver of weights. A plain class, which runs in a Ray actor or a thread.

Deliveries call `receiver` and `collective` in the "sync" lane. They do not change the weights in use: `generate`
activates the version of its request before it starts, and reports the version's digest.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.observability.profiler import StepProfiler
from async_flowrl.policies.kernels import repeatable_kernels
from async_flowrl.policies.one_base import OneBase
from async_flowrl.policies.registry import ResolvedModel
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.rollout.base import RolloutEngine
from async_flowrl.rollout.registry import load_engine, open_embeddings
from async_flowrl.rollout.text_encoder import StoredEmbeddings
from async_flowrl.transfers import ONE_AT_A_TIME
from async_flowrl.types import ACTIVATE, EMA, EVALUATION, POLICY, EmbeddingKey, RolloutReport, RolloutRequest, Span
from checkpoint_engine import EVALUATION as EVALUATION_SLOT
from checkpoint_engine import PROOF_VERSION, RING, Activation, Receiver
from checkpoint_engine.collective import CollectiveReceiver
from separation.node import bind

logger = logging.getLogger(__name__)


class RolloutWorker:
    """Makes images with one of its verified versions: the last max_staleness + 1, and one for evaluation."""

    def __init__(
        self,
        config: Config,
        model: ResolvedModel,
        index: int,
        name: str,
        upcoming: Sequence[EmbeddingKey] = (),
        *,
        base: OneBase | None = None,
    ) -> None:
        """`upcoming`: prompts to come, for cached embeddings; `base`: what a trainer rank of this process shares."""
        self.config, self.model, self.index, self.name = config, model, index, name
        self._upcoming, self._base = upcoming, base
        self.base_digest = ""
        self._profiler = StepProfiler(config, name)
        self.engine: RolloutEngine
        self.receiver: Receiver
        self.collective: CollectiveReceiver

    def load(self) -> dict[str, str]:
        """Loads the model and returns {"base_digest": digest of the base weights}; the trainer's must be equal."""
        if self.config.deterministic:
            repeatable_kernels()
        embeddings = open_embeddings(self.config, self.model, device(), self._upcoming, self.index, self._base)
        if embeddings is not None:
            self._encode_ahead(embeddings)
        with ONE_AT_A_TIME:
            return self._load(embeddings)

    def _encode_ahead(self, embeddings: StoredEmbeddings) -> None:
        embeddings.begin()

    def _load(self, embeddings: StoredEmbeddings | None) -> dict[str, str]:
        starts_cuda_elsewhere = self.config.rollout.engine == "vllm_omni"
        if self.config.runtime.numa_binding and not starts_cuda_elsewhere:
            logger.info("NUMA: this worker %s", bind())
        self.engine, self.base_digest = load_engine(self.config, self.model, device(), embeddings, self._base)
        tuning = tuning_of(self.config)
        self.receiver = Receiver(
            self.engine.live_tensors(),
            streams=(POLICY,) if self.config.trainer.ema_decay is None else (POLICY, EMA),
            capacity=self.config.live_versions,
            alpha=tuning.alpha,
            rank=tuning.rank,
            on_host=self.config.versions_on_host,
        )
        self.collective = CollectiveReceiver(self.receiver, self.receiver.slot_device)
        return {"base_digest": self.base_digest}

    def prove(self, version: int) -> dict[str, Tensor]:
        self._adopt(POLICY, version)
        return dict(self.engine.probe())

    def generate(self, requests: Sequence[RolloutRequest]) -> tuple[Any, ...]:
        """Makes tickets of one version in one batch; returns (reports, images, trajectory, images, ...).

        Only training has trajectories. The first report has the spans of all. Raises if the worker lacks the version.
        """
        began = time.time()
        digest, swaps = self._activate(requests[0])
        activated = time.time()
        first, tracing = requests[0], self._profiler.around
        with nullcontext() if first.kind == EVALUATION else tracing(first.step, f"-ticket-{first.ordinal:06d}"):
            rollouts = self.engine.generate(requests)
        reports = [
            RolloutReport(request.ordinal, request.version, digest, len(request.images), rollout.spans)
            for request, rollout in zip(requests, rollouts, strict=True)
        ]
        spans = (Span(ACTIVATE, began, activated), *reports[0].spans)
        reports[0] = replace(reports[0], spans=spans, swaps=swaps)
        return reports, *(part for rollout in rollouts for part in (rollout.images, rollout.trajectory))

    def _activate(self, request: RolloutRequest) -> tuple[str, int]:
        before = self.receiver.active
        if request.kind != EVALUATION:
            digest = self._adopt(POLICY, request.version)
        else:
            digest = self._adopt(self.receiver.streams[-1], request.version, slot=EVALUATION_SLOT)
        return digest, is_swap(before, self.receiver.active)

    def _adopt(self, stream: str, version: int, slot: str = RING) -> str:
        digest = self.receiver.activate(stream, version, slot=slot)
        export = partial(self.receiver.export, stream, version, slot=slot)
        self.engine.adopt(Activation(stream, version, digest), export)
        return digest


def is_swap(before: Activation | None, now: Activation | None) -> int:
    """1 where the weights are neither the same as before nor a newer version of the same stream, else 0."""
    if before is None or now is None or before.digest == now.digest or before.version == PROOF_VERSION:
        return 0
    return int(before.stream != now.stream or before.version > now.version)


def device() -> str:
    """Returns the device of this process, "cuda" or "cpu"; Ray shows a worker only its own GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
