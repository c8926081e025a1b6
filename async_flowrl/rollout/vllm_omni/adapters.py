"""The adapters inside a vllm-omni worker: one engine adapter per delivered version, verified bytes to bound layers."""

from typing import Any

import torch
from torch import Tensor

from async_flowrl.rollout.vllm_omni.names import adapter_tensors, engine_name, packed_place
from async_flowrl.rollout.vllm_omni.requests import AdapterSpec
from checkpoint_engine import EVALUATION, Activation, Header, LoraModule, Receiver, WeightsMismatch
from checkpoint_engine.digest import ByteArray

SLOT = EVALUATION
"""The receiver's slot that holds what came last, whatever its version: the engine's own table keeps the others."""


class Adapters:
    """Knows of every engine adapter which (stream, version, digest) it is. `manager` is vllm-omni's own."""

    def __init__(self, manager: Any, spec: AdapterSpec) -> None:
        self._manager, self._spec = manager, spec
        self._tensors = {e.name: torch.zeros(e.shape, dtype=torch.float32) for e in spec.layout.entries}
        self._receiver = Receiver(self._tensors, spec.streams, capacity=1, alpha=spec.alpha, rank=spec.rank)
        self._known: dict[int, Activation] = {}

    def holds(self, adapter: int) -> bool:
        return adapter in self._manager.list_adapters()

    def receive(self, header: Header, buffer: ByteArray, adapter: int) -> Activation:
        """Verifies a version, makes it engine adapter number `adapter` and binds it to the layers.

        Raises what checkpoint_engine's receiver raises, and ValueError where a tensor finds no layer.
        """
        from vllm_omni.lora.request import LoRARequest

        self._receiver.receive(header, buffer, slot=SLOT)
        digest = self._receiver.activate(header.stream, header.version, slot=SLOT)
        self._manager.remove_adapter(adapter)
        self._known = {number: held for number, held in self._known.items() if self.holds(number)}
        self._known[adapter] = Activation(header.stream, header.version, digest)
        name = f"{header.stream}-{header.version}"
        try:
            self._manager.set_active_adapter(LoRARequest(name, adapter, adapter_path(adapter)), 1.0)
        except BaseException:
            # The manager keeps an adapter whose binding failed, and would answer that it holds it.
            self._manager.remove_adapter(adapter)
            del self._known[adapter]
            raise
        return self._known[adapter]

    def load(self, adapter: int, dtype: torch.dtype) -> tuple[Any, Any]:
        """The engine's question for an adapter it does not hold: vllm's LoRA model and its description.

        Only what was received last can be answered with. Raises WeightsMismatch for anything else.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        if adapter not in self._known or self._receiver.active != self._known[adapter]:
            raise WeightsMismatch(f"adapter {adapter} was not delivered to this worker, or is gone")
        spec = self._spec
        layers = {name: (layer.a.clone(), layer.b.clone()) for name, layer in self._layers().items()}
        helper = PEFTHelper.from_dict(
            {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": [engine_name(name) for name in layers]}
        )
        tensors = adapter_tensors(layers)
        model = LoRAModel.from_lora_tensors(
            lora_model_id=adapter, tensors=tensors, peft_helper=helper, device="cpu", dtype=dtype
        )
        return model, helper

    def active(self) -> Activation:
        """What the layers compute with now. Raises WeightsMismatch while that is no delivered version."""
        held = self._known.get(self._manager._active_adapter_id)
        if held is None:
            raise WeightsMismatch("vllm-omni's network carries no delivered version")
        return held

    def layers(self, adapter: int) -> dict[str, LoraModule]:
        """The adapter received last as the live layers hold it, for the binding proof.

        The engine stores scaling * B, rounded, and each rank its part. So every live buffer is compared bit for bit
        with what the layer itself would store of the received tensors. Raises WeightsMismatch, naming the layer.
        """
        if self.active() != self._known.get(adapter) or self._receiver.active != self._known[adapter]:
            raise WeightsMismatch(f"adapter {adapter} is not the one that was received last")
        found = self._layers()
        for name, layer in found.items():
            self._check_live(name, layer)
        return found

    def _layers(self) -> dict[str, LoraModule]:
        scaling = self._spec.alpha / self._spec.rank
        names = sorted({entry.name.rsplit(".lora_", 1)[0] for entry in self._spec.layout.entries})
        return {
            name: LoraModule(self._tensors[f"{name}.lora_A.weight"], self._tensors[f"{name}.lora_B.weight"], scaling)
            for name in names
        }

    def _check_live(self, name: str, layer: LoraModule) -> None:
        modules, index = self._manager._lora_modules, 0
        live = modules.get(f"transformer.{engine_name(name)}")
        a: Any = layer.a
        if live is None:
            place = packed_place(name, self._manager._packed_modules_mapping)
            live = None if place is None else modules.get(f"transformer.{place[0]}")
            index = 0 if place is None else place[1]
        if live is None or not live._diffusion_lora_active_slices[index]:
            raise WeightsMismatch(f"{name} is not adapted in vllm-omni's network")
        # As vllm's LoRA loader does: rounded to the network's dtype, then scaled in it.
        b: Any = layer.b.to(live.lora_b_stacked[index].dtype) * layer.scaling
        if live.n_slices > 1:
            a = live.slice_lora_a([a if i == index else None for i in range(live.n_slices)])[index]
            b = live.slice_lora_b([b if i == index else None for i in range(live.n_slices)])[index]
        else:
            a, b = live.slice_lora_a(a), live.slice_lora_b(b)
        if not (_same(live.lora_a_stacked[index], a) and _same(live.lora_b_stacked[index], b)):
            raise WeightsMismatch(f"{name} in vllm-omni's network does not hold the tensors that were delivered for it")


def adapter_path(adapter: int) -> str:
    """vllm-omni wants a folder for each adapter; an absolute one that is never opened keeps it from asking a hub."""
    return f"/async_flowrl/adapter-{adapter}"


def _same(stacked: Tensor, tensor: Tensor) -> bool:
    """stacked [1, 1, rows, columns], rank padded to the engine's next size, against tensor [rows, columns]."""
    rows, columns = tensor.shape
    return torch.equal(stacked[0, 0, :rows, :columns].cpu(), tensor.to(stacked.dtype))
