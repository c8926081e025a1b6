"""Tests of attention backends and compiled blocks: equal results, and refusals of unavailable ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from async_flowrl.config.resolution import Resolution
from async_flowrl.observability.flops import FlopCounter
from async_flowrl.policies.kernels import compile_blocks, use_attention
from async_flowrl.policies.lora import lora_parameters
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.training.fsdp import checkpoint_blocks
from tests.support.families import NAMES, ONE_AND_EXTENDED, adapted, conditioning, how, model_config, policy_of
from tests.support.shared_models import SharedModels
from tests.support.tiny import tensors


def gradients(
    family: str, *, checkpointing: str, backend: Any = None, blocks: int | None = None, inner: bool = False
) -> list[torch.Tensor]:
    """`inner`: the first block's input needs a gradient, as that of all others does."""
    policy: Any = adapted(family)
    policy.transformer.transformer_blocks = policy.transformer.transformer_blocks[:blocks]
    checkpoint_blocks(policy, checkpointing)
    if backend is not None:
        compile_blocks(policy, backend)
    names = [name for name, _ in policy.transformer.named_parameters()]
    assert not any("_orig_mod" in name for name in names)
    positive, negative = conditioning(policy)
    x = torch.randn(2, *policy.latent_shape(32), generator=torch.Generator().manual_seed(0)).requires_grad_(inner)
    velocity = policy.velocity(x, torch.tensor([0.9, 0.3]), positive, negative, how(family))
    velocity.square().sum().backward()
    return [velocity.detach(), *(p.grad for p in lora_parameters(policy.transformer).values() if p.grad is not None)]


def counted(graphs: list[Any]) -> Any:
    """Returns a backend for torch.compile that notes each graph and computes it as it is."""

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend


@pytest.mark.extended
def test_compiled_blocks_give_the_same_gradients() -> None:
    graphs = list[Any]()
    plain = gradients("qwen_image", checkpointing="full", blocks=1)
    compiled = gradients("qwen_image", checkpointing="full", backend=counted(graphs), blocks=1)
    assert graphs
    assert len(plain) == len(compiled) > 10
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(plain, compiled, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_counting_changes_no_bit_of_compiled_blocks() -> None:
    """What the compiler keeps from the forward pass is not computed again, so that the counts differ a little.

    One block, whose input needs a gradient, stands for all but the first, for which all would be compiled again.
    """
    torch._dynamo.reset()
    with FlopCounter() as of_plain:
        gradients("qwen_image", checkpointing="full", blocks=1, inner=True)
    compiled = gradients("qwen_image", checkpointing="full", backend="inductor", blocks=1, inner=True)
    with FlopCounter() as of_compiled:
        counted = gradients("qwen_image", checkpointing="full", backend="inductor", blocks=1, inner=True)
    assert 0.8 * of_plain.total < of_compiled.total < 1.2 * of_plain.total
    assert all(torch.equal(a, b) for a, b in zip(compiled, counted, strict=True))


Shape = tuple[Resolution, str, int]
"""Image size, prompt, number of images."""
SHAPES: list[Shape] = [
    (32, "red", 2),
    (64, "red house beside a long river", 2),
    ((32, 64), "a small hill", 4),
    ((96, 32), "grey and blue", 3),
]


def velocities(policy: PipelinePolicy, family: str, shapes: Sequence[Shape]) -> dict[Shape, torch.Tensor]:
    """Returns the velocities of noise, made in this order."""
    made = {}
    for size, text, rows in shapes:
        positive = tensors(policy.encode([text])[0])
        x = torch.randn(rows, *policy.latent_shape(size), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            sampling = replace(how(family), resolution=size)
            made[size, text, rows] = policy.velocity(x, torch.full((rows,), 0.5), positive, None, sampling)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_blocks_are_compiled_once_for_all_sizes_texts_and_numbers_of_images(
    family: str, shared_models: SharedModels
) -> None:
    """Once for each kind of block and layout of its inputs in memory (FLUX.1 has two of each), where torch's default
    would compile again for the second shape."""
    torch._dynamo.reset()
    policy, graphs = policy_of(family), list[Any]()
    compile_blocks(policy, backend=counted(graphs))
    made = velocities(policy, family, SHAPES[:1])
    kinds = len(graphs)
    assert 0 < kinds <= 4
    made |= velocities(policy, family, SHAPES[1:])
    assert len(graphs) == kinds
    plain = velocities(shared_models.policy(family), family, SHAPES)
    assert all((made[shape] - plain[shape]).abs().max() < 1e-5 for shape in SHAPES)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_bits_do_not_depend_on_what_was_made_before(shared_models: SharedModels) -> None:
    """By the compiler that runs use: the same velocities in either order, but for roundings those of plain blocks.

    Each order has an empty cache, whose keys know nothing of sizes: it would return the code of the first order.
    """
    from torch._inductor.utils import fresh_cache

    found = []
    for order in (SHAPES, SHAPES[::-1]):
        torch._dynamo.reset()
        with fresh_cache():
            policy = policy_of("qwen_image")
            compile_blocks(policy)
            found.append(velocities(policy, "qwen_image", order))
    plain = velocities(shared_models.policy("qwen_image"), "qwen_image", SHAPES)
    for shape in SHAPES:
        assert torch.equal(found[0][shape], found[1][shape])
        assert (found[0][shape] - plain[shape]).abs().max() < 1e-5
    assert any(not torch.equal(found[0][shape], plain[shape]) for shape in SHAPES), "nothing was compiled"


@pytest.mark.parametrize("family", ONE_AND_EXTENDED)
def test_attention_goes_through_the_backend_or_is_refused(family: str, shared_models: SharedModels) -> None:
    policy, resolved = policy_of(family, parts="transformer"), resolve_model(model_config(family))
    if family in ("sd3", "sana"):
        with pytest.raises(ValueError, match=r"has no effect on (SD3|Sana)Transformer2DModel"):
            use_attention(policy.transformer, "_native_math")
        return
    other = load_policy(
        replace(resolved, attention_backend="_native_math"), dtype="float32", device="cpu", parts="transformer"
    )
    positive, _ = conditioning(shared_models.policy(family))
    x = torch.randn(2, *policy.latent_shape(32), generator=torch.Generator().manual_seed(0))
    found = [p.velocity(x, torch.tensor([0.9, 0.3]), positive, None, how(family)) for p in (policy, other)]
    assert (found[0] - found[1]).abs().max() < 1e-4
    chosen = {str(m.processor._attention_backend) for m in other.transformer.modules() if hasattr(m, "processor")}
    assert len(chosen) == 1 and "MATH" in chosen.pop().upper()
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
