"""An engine for `rollout.tickets_per_batch` above 1: several tickets go through the network in one batch.

Each ticket has a thread with the reference engine's denoising loop. When all of them wait for a velocity, one forward
pass computes it for all, in the order of the tickets, so timing does not change results.
"""

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from async_flowrl.config.resolution import Resolution
from async_flowrl.policies.base import Policy
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.rollout.base import Rollout
from async_flowrl.rollout.diffusers_engine import DiffusersEngine, shapes_by_name
from async_flowrl.types import RolloutRequest, Sampling, Span

Branch = Mapping[str, Tensor]


@dataclass(frozen=True)
class _VelocityCall:
    """The call of ticket number `index` for the velocity of `latents` [n, ...] at noise levels `sigma` [n]."""

    index: int
    latents: Tensor
    sigma: Tensor
    positive: Branch
    negative: Branch | None
    sampling: Sampling
    answer: "Future[Tensor]"


class _Shared:
    """A policy for the threads of several tickets: `velocity` waits for the common pass, other calls take turns."""

    def __init__(self, policy: PipelinePolicy, waiting: "queue.SimpleQueue[_VelocityCall | int]") -> None:
        self._policy, self._waiting = policy, waiting
        self._turn, self._thread = threading.RLock(), threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def enter(self, index: int) -> None:
        """Registers the calling thread as that of ticket `index`."""
        self._thread.index = index

    def velocity(
        self, latents: Tensor, sigma: Tensor, positive: Branch, negative: Branch | None, sampling: Sampling
    ) -> Tensor:
        answer: Future[Tensor] = Future()
        self._waiting.put(_VelocityCall(self._thread.index, latents, sigma, positive, negative, sampling, answer))
        return answer.result()

    def decode(self, latents: Tensor, resolution: Resolution) -> Tensor:
        with self._turn:
            return self._policy.decode(latents, resolution)

    def sigmas(self, num_inference_steps: int, resolution: Resolution) -> Tensor:
        with self._turn:
            return self._policy.sigmas(num_inference_steps, resolution)


class _Member(DiffusersEngine):
    """The engine of one ticket among several; only one thread at a time encodes prompts."""

    turn: threading.Lock

    def _plan(self, request: RolloutRequest) -> Any:
        with self.turn:
            return super()._plan(request)


class BatchingEngine(DiffusersEngine):
    """The reference engine, which can also denoise several tickets in one batch; equal batches give equal bits."""

    def __init__(self, policy: Policy, **options: Any) -> None:
        """Takes the options of `DiffusersEngine`. Raises ValueError for a policy that is not a `PipelinePolicy`."""
        super().__init__(policy, **options)
        self._waiting: queue.SimpleQueue[_VelocityCall | int] = queue.SimpleQueue()
        self._shared: Any = _Shared(check_shareable(policy), self._waiting)
        self._member = _Member(cast("Policy", self._shared), batch_size=self.batch_size, device=self.device)
        # Single tickets and those of a batch share the cache of prompts.
        self._member._prompts, self._member.turn = self._prompts, threading.Lock()

    @torch.no_grad()
    def generate_together(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Returns the images and trajectories of the requests, in order.

        Raises ValueError for requests that are not alike, and the error of the first failed ticket after all have
        ended.
        """
        check_alike(requests)
        futures: list[Future[Rollout]] = [Future() for _ in requests]
        threads = torch.get_num_threads()
        for index, request in enumerate(requests):
            work = (index, request, futures[index], threads)
            threading.Thread(target=self._run, args=work, name=f"ticket {request.ordinal}", daemon=True).start()
        flops = self._serve(len(requests))
        rollouts = [future.result() for future in futures]
        return [
            replace(future, spans=tuple(replace(s, flops=flops) if s.name == "generate" else s for s in future.spans))
            for future in rollouts
        ]

    def _run(self, index: int, request: RolloutRequest, future: "Future[Rollout]", threads: int) -> None:
        """Runs one ticket. `threads` is torch's number of threads, a setting per thread that can change rounding."""
        try:
            torch.set_num_threads(threads)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            self._shared.enter(index)
            future.set_result(self._member.generate(request))
        except BaseException as error:
            future.set_exception(error)
        finally:
            self._waiting.put(index)

    def _serve(self, tickets: int) -> float | None:
        """Answers the tickets until all have ended. Returns the FLOPs per ticket, if they were counted."""
        calls: list[_VelocityCall] = []
        total: float | None = 0.0
        left = tickets
        while left:
            came = self._waiting.get()
            if isinstance(came, int):
                left -= 1
            else:
                calls.append(came)
            if calls and len(calls) == left:
                calls.sort(key=lambda call: call.index)
                flops = self._answer(calls)
                total = None if total is None or flops is None else total + flops
                calls = []
        return None if total is None else total / tickets

    def _answer(self, calls: Sequence[_VelocityCall]) -> float | None:
        branches = [(call.latents.shape, call.positive, call.negative or {}) for call in calls]
        shape = tuple((latents, shapes_by_name(one), shapes_by_name(other)) for latents, one, other in branches)
        try:
            with self._meter.measure(shape):
                answers = velocities(cast("PipelinePolicy", self.policy), calls)
        except BaseException as error:
            for call in calls:
                call.answer.set_exception(error)
            return None
        for call, velocity in zip(calls, answers, strict=True):
            call.answer.set_result(velocity)
        return self._meter.flops(shape)


def velocities(policy: PipelinePolicy, calls: Sequence[_VelocityCall]) -> list[Tensor]:
    """Returns the velocity of each call from one forward pass; with guidance, negative prompts follow all prompts.

    On CUDA negative prompts of other lengths have a pass of their own, since they would be padded most.
    """
    latents, sigma = torch.cat([call.latents for call in calls]), torch.cat([call.sigma for call in calls])
    prompts = [call.positive for call in calls]
    negatives = [call.negative for call in calls if call.negative is not None]
    return list(policy.velocity_of(latents, sigma, prompts, negatives, calls[0].sampling).chunk(len(calls)))


def check_shareable(policy: Policy) -> PipelinePolicy:
    """Returns the policy if its network takes several prompts at once; otherwise raises ValueError."""
    if not isinstance(policy, PipelinePolicy):
        raise ValueError(
            f"rollout.tickets_per_batch above 1 needs a model family built on PipelinePolicy, {policy.family} is not"
        )
    return policy


def merged_spans(spans: Sequence[Sequence[Span]]) -> tuple[Span, ...]:
    """Returns one span per name, from the first start to the last end of all tickets, with sums of flops and bytes."""
    named: dict[str, list[Span]] = {}
    for span in (span for of_ticket in spans for span in of_ticket):
        named.setdefault(span.name, []).append(span)
    return tuple(
        Span(
            name,
            min(span.start for span in alike),
            max(span.end for span in alike),
            None if any(span.flops is None for span in alike) else sum(span.flops or 0 for span in alike),
            None if any(span.bytes is None for span in alike) else sum(span.bytes or 0 for span in alike),
        )
        for name, alike in named.items()
    )


def check_alike(requests: Sequence[RolloutRequest]) -> None:
    """Raises ValueError for requests that cannot share a batch (see `generate_together`)."""
    first = requests[0]
    for other in requests[1:]:
        same = (other.sampling, other.kind, other.version) == (first.sampling, first.kind, first.version)
        if not same or len(other.images) != len(first.images):
            raise ValueError(
                f"tickets {first.ordinal} and {other.ordinal} cannot share a batch: they must have the same version, "
                "kind, sampling and number of images"
            )
