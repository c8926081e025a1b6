"""Tests of versions in the real vllm-omni: adapters, deliveries, updates in the middle of a ticket."""

import gc
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm_omni", reason="vllm-omni is not installed; `make test-vllm-omni` sets an environment up")

from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel

from async_flowrl.policies.lora import lora_layers, lora_modules, reference_mode
from async_flowrl.rollout.vllm_omni.engine import VllmOmniError
from async_flowrl.rollout.vllm_omni.extension import Adapters
from checkpoint_engine import Activation, LoraModule, binding_probe, check_binding
from tests.support.tiny import request
from tests.vllm_omni.rig import Rig, gap, same


def test_every_version_is_an_adapter_of_its_own(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going back to a version that is still there delivers nothing and gives the same bits."""
    received: list[int] = []
    receive = Adapters.receive

    def counted(self: Adapters, header: Any, buffer: Any, adapter: int) -> Activation:
        received.append(header.version)
        return receive(self, header, buffer, adapter)

    monkeypatch.setattr(Adapters, "receive", counted)
    first, second = rig.made(request(2), 11), rig.made(request(2), 12)
    assert received == [11, 12]
    assert same(first, rig.made(request(2), 11)) and received == [11, 12]
    assert gap(first, second) > 1e-2
    with reference_mode(rig.policy.transformer):
        base = rig.reference.generate([request(2)])[0]
    assert gap(first, base) > 1e-2, "the adapter changes nothing"


def test_a_version_pushed_out_is_delivered_again(rig: Rig) -> None:
    first = rig.made(request(2), 21)
    for version in range(22, 28):
        rig.made(request(2), version)
    assert same(first, rig.made(request(2), 21))


def test_the_binding_proof_holds_and_sees_a_foreign_tensor(rig: Rig) -> None:
    header, data = rig.payload(31)
    rig.engine.adopt(rig.activation(header), lambda: (header, data))
    rig.hold(31)
    layers = lora_layers(lora_modules(rig.policy.transformer))
    trainer = binding_probe({name: LoraModule(*parts) for name, parts in layers.items()})
    check_binding(trainer, rig.engine.probe())
    live = live_layer("transformer_blocks.0.attn.to_qkv")
    kept = live.lora_b_stacked[1].clone()
    live.lora_b_stacked[1].copy_(live.lora_b_stacked[0])
    try:
        with pytest.raises(VllmOmniError, match=r"transformer_blocks\.0\.attn\.to_k in vllm-omni's network"):
            rig.engine.probe()
    finally:
        live.lora_b_stacked[1].copy_(kept)
    check_binding(trainer, rig.engine.probe())


def the_adapters() -> Adapters:
    (adapters,) = [kept for kept in gc.get_objects() if isinstance(kept, Adapters)]
    return adapters


def live_layer(name: str) -> Any:
    return the_adapters()._manager._lora_modules[f"transformer.{name}"]


def test_damaged_or_wrongly_scaled_deliveries_are_refused(rig: Rig) -> None:
    good = rig.made(request(2), 51)
    header, data = rig.payload(52)
    damaged = data.copy()
    damaged[100] ^= 1
    with pytest.raises(VllmOmniError, match=r"wrong bytes in transformer_blocks"):
        rig.engine.adopt(rig.activation(header), lambda: (header, damaged))
    scaled, data = rig.payload(53, alpha=32.0)
    with pytest.raises(VllmOmniError, match=r"LoRA alpha 32\.0, expected 12\.0"):
        rig.engine.adopt(rig.activation(scaled), lambda: (scaled, data))
    with pytest.raises(VllmOmniError, match="no version was adopted"):
        rig.engine.generate([request(2)])
    assert same(good, rig.made(request(2), 51))


def test_an_update_in_the_middle_of_a_ticket_stays_out_of_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 reaches the worker, and even the engine, while a ticket of version 0 is denoised."""
    for version in (0, 1):
        rig.deliver(version)
    undisturbed = rig.worker.generate([replace(request(4), version=0)])
    inside, delivered = threading.Event(), threading.Event()
    forward = QwenImageTransformer2DModel.forward

    def slow(self: Any, *arguments: Any, **named: Any) -> Any:
        inside.set()
        assert delivered.wait(60)
        return forward(self, *arguments, **named)

    monkeypatch.setattr(QwenImageTransformer2DModel, "forward", slow)
    results: list[Any] = []
    ticket = threading.Thread(target=lambda: results.append(rig.worker.generate([replace(request(4), version=0)])))
    ticket.start()
    assert inside.wait(60)
    newest = rig.deliver(2)
    late = threading.Thread(target=lambda: rig.engine.client.call("rollout_receive", Activation, *rig.payload(61), 61))
    late.start()
    delivered.set()
    ticket.join(60)
    late.join(60)
    monkeypatch.undo()
    (((report,), images, trajectory),) = results
    assert (report.version, report.digest) == (0, undisturbed[0][0].digest) and report.digest != newest.digest
    assert np.array_equal(images, undisturbed[1]) and np.array_equal(trajectory.latents, undisturbed[2].latents)
    after = rig.worker.generate([replace(request(4), version=2)])
    assert after[0][0].digest == newest.digest and not np.array_equal(after[1], images)
