"""Extension of vllm-omni's ranks: remote calls beside generation, and the adapters (LoRAs) that the calls deliver."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, init_process_group  # type: ignore[attr-defined]
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.linear import LinearBase
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.lora.request import LoRARequest
from vllm_omni.platforms import current_omni_platform

from async_flowrl.config.schema import Config, LoraConfig
from async_flowrl.policies.registry import ResolvedModel
from async_flowrl.rollout.vllm_omni.engine_settings import STORE_PORT, Names, NetworkShapes, Unpacked
from async_flowrl.types import EMA, POLICY, Conditioning, EncoderInput
from checkpoint_engine import (
    EVALUATION,
    Activation,
    Header,
    LoraModule,
    Receiver,
    WeightsMismatch,
    base_digest,
    binding_probe,
)
from checkpoint_engine.digest import ByteArray


class RolloutWorkerExtension(CustomPipelineWorkerExtension):  # type: ignore[misc]
    """Mixin before vllm-omni's worker class. Methods named `rollout_*` run on every rank, between two requests."""

    def init_device(self) -> None:
        """Joins the process group at the rollout worker's store, which vllm-omni's own `init_device` then uses."""
        end_with_parent()
        port, world = self.od_config.custom_pipeline_args[STORE_PORT], self.od_config.num_gpus
        store = PrefixStore("engine", TCPStore("localhost", port, world, is_master=False))
        init_process_group(current_omni_platform.dist_backend, store=store, rank=self.rank, world_size=world)
        super().init_device()

    def rollout_open(self, config: Config, model: ResolvedModel, shapes: NetworkShapes) -> str:
        """Prepares the pipeline; returns the base's digest. Raises ValueError for targets without adapters."""
        pipeline = self.model_runner.pipeline
        network = pipeline.transformer
        live = {name: parameter.detach() for name, parameter in network.named_parameters()}
        flat = not any(name.endswith(".to_out.0") for name, _ in network.named_modules())
        names = Names(self.lora_manager._packed_modules_mapping, flat)
        digest = base_digest(Unpacked(live, shapes.base, names, tensor_model_parallel_all_gather))
        adapters = Adapters(self.lora_manager, names, shapes, config.lora)
        check_adaptable(network, adapters.modules)
        self._rollout_adapters = adapters
        pipeline.open_rollout(adapters, config, model, shapes.config)
        return digest

    def rollout_holds(self, adapter: int) -> bool:
        return adapter in self.lora_manager.list_adapters()

    def rollout_receive(self, header: Header, buffer: ByteArray, adapter: int) -> Activation:
        return self._rollout_adapters.receive(header, buffer, adapter)

    def rollout_probe(self, adapter: int) -> dict[str, Tensor]:
        return binding_probe(self._rollout_adapters.layers(adapter))

    def rollout_encode(self, texts: list[EncoderInput]) -> dict[int, Conditioning]:
        """Returns position → embeddings; vllm-omni would take a list for one answer per rank."""
        return dict(enumerate(self.model_runner.pipeline.engine.encode(texts)))


def end_with_parent() -> None:
    """Kills this process when its parent ends; vllm-omni's SIGTERM reaches no rank inside a collective."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def check_adaptable(network: torch.nn.Module, modules: Mapping[str, str]) -> None:
    """Raises ValueError if one of `modules` (diffusers' name → vllm-omni's) is no linear layer of vllm."""
    linear = {name for name, module in network.named_modules() if isinstance(module, LinearBase)}
    if missing := sorted(name for name, module in modules.items() if module not in linear):
        raise ValueError(
            f"lora.targets: vllm-omni has no adapters for {', '.join(missing[:3])}{' …' if missing[3:] else ''} "
            f"({len(missing)} of {len(modules)} layers); leave them out or use rollout.engine=diffusers"
        )


class Adapters:
    """Adapters of a rank, one per delivered version, each known by stream, version and digest.

    `manager` is vllm-omni's table of adapters. The receiver holds only the version that came last.
    """

    def __init__(self, manager: Any, names: Names, shapes: NetworkShapes, lora: LoraConfig) -> None:
        self._manager, self._names, self._lora = manager, names, lora
        self._tensors = shapes.empty_adapter()
        self._receiver = Receiver(self._tensors, (POLICY, EMA), capacity=1, alpha=lora.alpha, rank=lora.rank)
        adapted = {name.rsplit(".lora_", 1)[0] for name in shapes.adapter}
        self._layers = {name: self._layer(name) for name in sorted(adapted)}
        self._known: dict[int, Activation] = {}

    @property
    def modules(self) -> dict[str, str]:
        return {name: self._names.slice(name)[0] for name in self._layers}

    def receive(self, header: Header, buffer: ByteArray, adapter: int) -> Activation:
        """Verifies a version and binds it as adapter number `adapter`. Raises the receiver's errors, and ValueError."""
        self._receiver.receive(header, buffer, slot=EVALUATION)
        digest = self._receiver.activate(header.stream, header.version, slot=EVALUATION)
        self._manager.remove_adapter(adapter)
        active = self._known[adapter] = Activation(header.stream, header.version, digest)
        try:
            self._manager.set_active_adapter(lora_request(active, adapter), 1.0)
        except BaseException:
            # The manager keeps an adapter whose binding failed, and would later report that it holds it.
            self._manager.remove_adapter(adapter)
            del self._known[adapter]
            raise
        return active

    def load(self, adapter: int, dtype: torch.dtype) -> tuple[Any, Any]:
        """Returns vllm's LoRA model and description of the last adapter. Raises WeightsMismatch for another."""
        if adapter not in self._known or self._receiver.active != self._known[adapter]:
            raise WeightsMismatch(f"adapter {adapter} was not delivered to this worker, or is gone")
        helper = PEFTHelper(
            r=self._lora.rank, lora_alpha=self._lora.alpha, target_modules=list(map(self._names.engine, self._layers))
        )
        tensors = {self._names.key(name): tensor.clone() for name, tensor in self._tensors.items()}
        model = LoRAModel.from_lora_tensors(adapter, tensors, helper, device="cpu", dtype=dtype)
        return model, helper

    def active(self) -> Activation:
        """Returns the version with which the layers compute now. Raises WeightsMismatch if none was delivered."""
        active = self._known.get(self._manager._active_adapter_id)
        if active is None:
            raise WeightsMismatch("vllm-omni's network carries no delivered version")
        return active

    def layers(self, adapter: int) -> Mapping[str, LoraModule]:
        """Returns module name → layer of the last adapter, after a check that the live layers hold it bit for bit.

        A live layer stores A and scaling * B, rounded, and only its rank's shard. Raises WeightsMismatch.
        """
        if not self.active() == self._known.get(adapter) == self._receiver.active:
            raise WeightsMismatch(f"adapter {adapter} is not the one that was received last")
        for name, layer in self._layers.items():
            self._check_live(name, layer)
        return self._layers

    def _layer(self, name: str) -> LoraModule:
        a, b = (self._tensors[f"{name}.lora_{side}.weight"] for side in "AB")
        return LoraModule(a, b, self._lora.alpha / self._lora.rank)

    def _check_live(self, name: str, layer: LoraModule) -> None:
        module, index = self._names.slice(name)
        live = self._manager._lora_modules.get(f"transformer.{module}")
        if live is None or not live._diffusion_lora_active_slices[index]:
            raise WeightsMismatch(f"{name} is not adapted in vllm-omni's network")
        a: Any = layer.a
        # vllm's LoRA loader rounds B to the network's dtype and then scales it in that dtype.
        b: Any = layer.b.to(live.lora_b_stacked[index].dtype) * layer.scaling
        if live.n_slices > 1:
            a = live.slice_lora_a([a if i == index else None for i in range(live.n_slices)])[index]
            b = live.slice_lora_b([b if i == index else None for i in range(live.n_slices)])[index]
        else:
            a, b = live.slice_lora_a(a), live.slice_lora_b(b)
        if not (_same(live.lora_a_stacked[index], a) and _same(live.lora_b_stacked[index], b)):
            raise WeightsMismatch(f"{name} in vllm-omni's network does not hold the tensors that were delivered for it")


def lora_request(active: Activation, adapter: int) -> Any:
    """Returns vllm-omni's request for adapter number `adapter`; the absolute path, never opened, avoids the hub."""
    return LoRARequest(f"{active.stream}-{active.version}", adapter, f"/async_flowrl/adapter-{adapter}")


def _same(stacked: Tensor, tensor: Tensor) -> bool:
    rows, columns = tensor.shape
    return torch.equal(stacked[0, 0, :rows, :columns].cpu(), tensor.to(stacked.dtype))
