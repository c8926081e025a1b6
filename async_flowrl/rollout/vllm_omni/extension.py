"""What vllm-omni's workers can do beside generating: our remote calls, mixed into its worker class."""

import multiprocessing
import multiprocessing.process
import os
import signal
import threading
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, init_process_group  # type: ignore[attr-defined]
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from async_flowrl.rollout.vllm_omni.adapters import Adapters
from async_flowrl.rollout.vllm_omni.names import unpacked
from async_flowrl.rollout.vllm_omni.requests import Opening
from async_flowrl.rollout.vllm_omni.settings import STORE_PORT
from async_flowrl.types import Conditioning, Wording
from checkpoint_engine import Activation, Header, base_digest, binding_probe
from checkpoint_engine.digest import ByteArray


class RolloutWorkerExtension(CustomPipelineWorkerExtension):  # type: ignore[misc]
    """Mixed in front of vllm-omni's worker. Methods with a prefix run on every rank, between two requests."""

    def init_device(self) -> None:
        """The first thing that happens in a rank, in front of vllm-omni's own, which uses the world that it finds.

        The ranks meet at a store that the rollout worker holds open.
        """
        end_with_parent()
        from vllm_omni.platforms import current_omni_platform

        port, world = self.od_config.custom_pipeline_args[STORE_PORT], self.od_config.num_gpus
        store = TCPStore("localhost", port, world, is_master=False)
        init_process_group(
            current_omni_platform.dist_backend,
            store=PrefixStore("engine", store),
            rank=self.rank,
            world_size=world,
        )
        super().init_device()

    def rollout_open(self, opening: Opening) -> str:
        """Prepares the pipeline for tickets. Returns the digest of the base weights, under diffusers' names."""
        network = self.model_runner.pipeline.transformer
        live = {name: parameter.detach() for name, parameter in network.named_parameters()}
        digest = base_digest(unpacked(live, opening.base, network.packed_modules_mapping, _gather))
        self._rollout_adapters = Adapters(self.lora_manager, opening.adapter)
        self.model_runner.pipeline.open_rollout(self._rollout_adapters, opening)
        return digest

    def rollout_holds(self, adapter: int) -> bool:
        return self._rollout_adapters.holds(adapter)

    def rollout_receive(self, header: Header, buffer: ByteArray, adapter: int) -> Activation:
        return self._rollout_adapters.receive(header, buffer, adapter)

    def rollout_probe(self, adapter: int) -> dict[str, Tensor]:
        return binding_probe(self._rollout_adapters.layers(adapter))

    def rollout_encode(self, texts: list[Wording]) -> dict[int, Conditioning]:
        """By place: vllm-omni would take a list for one answer per rank."""
        return dict(enumerate(self.model_runner.pipeline.engine.encode(texts)))


def end_with_parent() -> None:
    """A tensor-parallel rank is a process of its own, which outlives a rollout worker that is killed; so it watches."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_outlive, args=(parent,), name="end-with-parent", daemon=True).start()


def _outlive(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _gather(tensor: Tensor, dimension: int) -> Tensor:
    from vllm.distributed import tensor_model_parallel_all_gather

    gathered: Any = tensor_model_parallel_all_gather(tensor, dimension)
    whole: torch.Tensor = gathered
    return whole
