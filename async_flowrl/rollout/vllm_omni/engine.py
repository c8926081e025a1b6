"""Rollout engine `vllm_omni`: runs vllm-omni in the rollout worker and names the version of each ticket."""

import asyncio
import itertools
import multiprocessing
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from async_flowrl.config.resolution import height_width
from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import ResolvedModel, folder_of
from async_flowrl.rollout.base import Export, Rollout
from async_flowrl.rollout.diffusers_engine import check_alike
from async_flowrl.rollout.vllm_omni.engine_settings import (
    REQUEST,
    ROLLOUT,
    check_installed,
    engine_arguments,
    network_shapes,
    tensor_parallel,
)
from async_flowrl.types import Conditioning, EncoderInput, RolloutRequest
from checkpoint_engine import Activation
from separation.group import Unusable
from separation.rendezvous import open_store

T = TypeVar("T")
DYING_SECONDS = 5.0


class VllmOmniError(RuntimeError):
    """vllm-omni refused a call, failed in it, or gave an unexpected answer."""


class VllmOmniEngine:
    """Generates tickets with vllm-omni, each on exactly the version that it names.

    `adopt` sends the bytes of a version to vllm-omni as an adapter with a number of its own, which answers repeat.
    Methods raise VllmOmniError, and Unusable if vllm-omni does not answer in time or has lost the process of a rank.
    """

    def __init__(self, config: Config, model: ResolvedModel) -> None:
        check_installed()
        # Without this, every worker prints hundreds of lines at its start.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        shapes = network_shapes(config, model)
        self._parameters = shapes.empty_adapter()
        # With a hub name, vllm-omni would take the newest revision.
        local = replace(model, path=str(folder_of(model, "all")), revision=None)
        self.client = _started(config, local)
        self._numbers: dict[Activation, int] = {}
        self._active: Activation | None = None
        self._requests = itertools.count()
        self.base_digest = self.client.call("rollout_open", str, config, local, shapes)

    def encode(self, texts: Sequence[EncoderInput]) -> list[Conditioning]:
        encoded = self.client.call("rollout_encode", dict, list(texts))
        return [encoded[index] for index in range(len(texts))]

    def live_tensors(self) -> Mapping[str, Tensor]:
        return self._parameters

    def adopt(self, active: Activation, export: Export) -> None:
        """Delivers the version `active` if it is lacking, and uses it. Raises VllmOmniError."""
        if active == self._active:
            return
        self._active = None
        number = self._numbers.setdefault(active, len(self._numbers) + 1)
        if not self.client.call("rollout_holds", bool, number):
            received = self.client.call("rollout_receive", Activation, *export(), number)
            if received != active:
                raise VllmOmniError(f"vllm-omni received {received} when it was sent {active}")
        self._active = active

    def probe(self) -> Mapping[str, Tensor]:
        return self.client.call("rollout_probe", dict, self._numbers[self._adopted()])

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Generates tickets as one request. Raises as `check_alike`, and VllmOmniError if it ran on another version."""
        check_alike(requests)
        first, active = requests[0], self._adopted()
        name = f"{first.kind}-{first.ordinal}-{next(self._requests)}"
        answer = self.client.generate(first.prompt.text, self._sampling(requests, active), name)
        if answer.get("active") != active:
            raise VllmOmniError(f"ticket {first.ordinal} needs {active}, vllm-omni ran it on {answer.get('active')}")
        rollouts: list[Rollout] = answer.get("rollouts") or []
        if [len(rollout.images) for rollout in rollouts] != [len(request.images) for request in requests]:
            raise VllmOmniError(f"vllm-omni answered ticket {first.ordinal} with another number of images")
        return rollouts

    def close(self) -> None:
        self.client.close()

    def _adopted(self) -> Activation:
        if self._active is None:
            raise VllmOmniError("no version was adopted yet, so there is nothing to generate with")
        return self._active

    def _sampling(self, requests: Sequence[RolloutRequest], active: Activation) -> Any:
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        from async_flowrl.rollout.vllm_omni.extension import lora_request

        sampling = requests[0].sampling
        height, width = height_width(sampling.resolution)
        return OmniDiffusionSamplingParams(
            height=height,
            width=width,
            num_inference_steps=sampling.num_inference_steps,
            true_cfg_scale=sampling.true_cfg_scale,
            num_outputs_per_prompt=sum(len(request.images) for request in requests),
            seed=0,
            generator_device="cpu",
            lora_request=lora_request(active, self._numbers[active]),
            lora_scale=1.0,
            extra_args={REQUEST: tuple(requests)},
        )


class Client:
    """Blocking client of `AsyncOmni`, whose event loop runs on a thread of its own; usable from any thread."""

    def __init__(self, arguments: Mapping[str, Any], *, start_timeout: float, timeout: float) -> None:
        """Starts vllm-omni within `start_timeout` seconds, or raises Unusable; `timeout` is for later calls."""
        self._timeout = timeout
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-omni", daemon=True)
        self._thread.start()
        before = multiprocessing.active_children()
        try:
            self._omni = self._await(_start(arguments), start_timeout)
        except BaseException:
            self._stop_loop()
            raise
        # Processes of the ranks, if there are several; a single rank runs in this process.
        self._ranks = [process for process in multiprocessing.active_children() if process not in before]

    def generate(self, prompt: str, parameters: Any, request_id: str) -> Mapping[str, Any]:
        """Returns our pipeline's answer to one request. Raises vllm-omni's errors, VllmOmniError and Unusable."""
        with self._lost_if_dead():
            output = self._await(self._generate(prompt, parameters, request_id), self._timeout)
            return metadata(output, ROLLOUT)

    def call(self, method: str, kind: type[T], *args: Any) -> T:
        """Runs a method of the extension on every rank; returns rank 0's answer, a `kind`. Raises as `generate`."""
        with self._lost_if_dead():
            results = self._await(self._omni.collective_rpc(method, timeout=self._timeout, args=args), self._timeout)
            return reply(method, results, kind)

    def close(self) -> None:
        self._omni.shutdown()
        self._stop_loop()

    async def _generate(self, prompt: str, parameters: Any, request_id: str) -> Any:
        stream = self._omni.generate({"prompt": prompt}, sampling_params=parameters, request_id=request_id)
        outputs = [output async for output in stream]
        return outputs[-1] if outputs else None

    def _await(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return answer.result(timeout)
        except TimeoutError as error:
            if answer.done():  # The error is vllm-omni's.
                raise
            raise Unusable(f"vllm-omni did not answer within {timeout:g} s") from error

    @contextmanager
    def _lost_if_dead(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # The connections of a process that dies may end before the process does.
            if self._ranks:
                wait([rank.sentinel for rank in self._ranks], timeout=DYING_SECONDS)
            if dead := [f"{rank.name} (exit code {rank.exitcode})" for rank in self._ranks if rank.exitcode]:
                raise Unusable(f"vllm-omni has lost processes: {', '.join(dead)}; {error}") from error
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm_omni import AsyncOmni

    return AsyncOmni(**arguments)


def _started(config: Config, model: ResolvedModel) -> Client:
    ranks = tensor_parallel(config.rollout.gpus_per_worker, torch.cuda.device_count())
    port = open_store(ranks, config.deadlines.load)
    arguments = engine_arguments(config, folder=model.path, family=model.family, ranks=ranks, port=port)
    seconds = config.deadlines.generate * config.rollout.tickets_per_batch
    return Client(arguments, start_timeout=config.deadlines.load, timeout=seconds)


def reply(method: str, results: Any, kind: type[T]) -> T:
    """Returns the one answer, of type `kind`, in the nested lists of `collective_rpc`. Raises VllmOmniError."""
    answer = results
    while isinstance(answer, list | tuple):
        if len(answer) != 1:
            raise VllmOmniError(f"vllm-omni answered {method} {len(answer)} times, expected once: {answer!r:.300}")
        (answer,) = answer
    if isinstance(answer, Mapping) and (answer.get("supported") is False or answer.get("todo") or "error" in answer):
        reason = answer.get("error") or answer.get("reason") or dict(answer)
        raise VllmOmniError(f"vllm-omni failed in {method}: {reason}")
    if not isinstance(answer, kind):
        raise VllmOmniError(f"vllm-omni answered {method} with {type(answer).__name__}, expected {kind.__name__}")
    return answer


def metadata(output: Any, group: str) -> Mapping[str, Any]:
    """Returns the pipeline's metadata `group` of a finished request. Raises VllmOmniError if the request failed."""
    if output is None:
        raise VllmOmniError("vllm-omni ended a request without an answer")
    if getattr(output, "error", None):
        raise VllmOmniError(f"vllm-omni failed in a request: {output.error}")
    answer = ((getattr(output, "multimodal_output", None) or {}).get("metadata") or {}).get(group)
    if not isinstance(answer, Mapping):
        raise VllmOmniError(f"vllm-omni answered a request without our pipeline's {group!r}")
    return answer
