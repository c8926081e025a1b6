"""Stage `probe`: ceilings of the card, and what a mask, determinism, torch.compile and CUDA graphs do to one block.

The block is Qwen-Image's own in bfloat16; on a CPU it is small, and no figure counts. Milliseconds are medians.
"""

import os
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from async_flowrl.policies.kernels import repeatable_kernels
from benchmarks.gpu_first_hour.sizes import HEAD_DIM, real_card
from benchmarks.gpu_first_hour.task import Task

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, IMAGES, TOKENS, TEXT = (24, 4, 1024, 128) if real_card() else (2, 2, 64, 8)
WIDTH = HEADS * HEAD_DIM
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
Figures = dict[str, Any]


def probe(task: Task) -> None:
    """Says each measurement; one that fails is said, too, and the next one follows."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it once, at the first product
    parts: dict[str, Callable[[], Figures]] = {"ceilings": ceilings}
    for fixed in (False, True):
        for masked in (False, True):
            parts[f"block, deterministic={fixed}, mask={masked}"] = partial(plain, fixed, masked)
    for masked in (False, True):
        for backend in BACKENDS:
            parts[f"attention {backend}, mask={masked}"] = partial(attention, backend, masked)
    parts |= {f"CUDA graph, {count} images": partial(cuda_graph, count) for count in (IMAGES, 1)}
    parts |= {f"compiled, dynamic={dynamic}": partial(compiled, dynamic) for dynamic in (True, False)}
    for name, work in parts.items():
        try:
            task.say(name, **(work() if task.left > 0 else {"skipped": "no time was left"}))
        except Exception as error:
            traceback.print_exc()
            task.say(name, ok=False, error=f"{type(error).__name__}: {error}"[:300])


def ceilings() -> Figures:
    """Returns the speed of a large product, of copies on the device, and between it and pinned or pageable memory."""
    n, size = (8192, 2**30) if real_card() else (256, 2**20)
    a, b, here = drawn(n, n), drawn(n, n), torch.empty(size, dtype=torch.uint8, device=DEVICE)
    there = torch.empty_like(here)
    figures = {"matmul_tflops": 2 * n**3 / ms(lambda: a @ b) / 1e9, "copy_gbps": 2 * size / ms_of_copy(there, here)}
    for kind in ("pinned", "pageable") if DEVICE.type == "cuda" else ():
        host = torch.empty(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        figures |= {f"{kind}_to_host_gbps": size / ms_of_copy(host, here)}
        figures |= {f"{kind}_to_card_gbps": size / ms_of_copy(here, host)}
    return figures


def plain(deterministic: bool, masked: bool) -> Figures:
    """Returns the speed of the block; from the first call with deterministic=true on, all kernels repeat."""
    if deterministic:
        repeatable_kernels()
    return speed(new_block(), inputs(IMAGES, masked=masked))


def attention(backend: str, masked: bool) -> Figures:
    """Returns the milliseconds of attention, forward and backward, by one backend of torch; some refuse a mask."""
    rows = TOKENS + TEXT
    q, k, v = (drawn(IMAGES, HEADS, rows, HEAD_DIM).requires_grad_() for _ in range(3))
    mask = torch.arange(rows, device=DEVICE).view(1, 1, 1, -1) >= TEXT // 2 if masked else None

    def both() -> None:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).float().sum().backward()  # type: ignore[no-untyped-call]

    try:
        return {"ms": ms(both, 5)}
    except RuntimeError as error:
        return {"refused": str(error).splitlines()[0][:200]}


def cuda_graph(images: int) -> Figures:
    """Returns what a CUDA graph of the block's forward gains for so many images, and whether its bits stay."""
    if not real_card():
        return {"skipped": "needs a real card"}
    block, given = new_block(), inputs(images)
    with torch.no_grad():
        eager, expected = ms(lambda: block(**given)), block(**given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = block(**given)
    return {"eager_ms": eager, "graph_ms": ms(graph.replay), "same_bits": equal(expected, captured)}


def compiled(dynamic: bool) -> Figures:
    """Returns the seconds to compile the block, its speed, and how far its results are from eager ones."""
    torch._dynamo.reset()
    block, given = new_block(), inputs(IMAGES)
    with torch.no_grad():
        eager, began = block(**given), time.perf_counter()
        block.compile(dynamic=dynamic)
        fast = block(**given)
    error = float((fast[1].float() - eager[1].float()).norm() / eager[1].float().norm())
    first = time.perf_counter() - began
    return {"first_s": first, "error": error, "same_bits": equal(fast, eager), **speed(block, given)}


def speed(block: nn.Module, given: Figures) -> Figures:
    """Returns milliseconds of the forward, and of forward and backward, and TFLOP/s of the forward."""
    hidden = given["hidden_states"].clone().requires_grad_()
    images, rows = len(hidden), TOKENS + TEXT

    @torch.no_grad()
    def forward() -> None:
        block(**given)

    def both() -> None:
        text, image = block(**{**given, "hidden_states": hidden})
        torch.autograd.backward(text.float().square().mean() + image.float().square().mean())

    taken = ms(forward)
    flops = 24 * images * (rows + 1) * WIDTH**2 + 4 * images * rows**2 * WIDTH
    return {"forward_ms": taken, "both_ms": ms(both), "forward_tflops": flops / taken / 1e9}


def new_block() -> nn.Module:
    """Returns a block in which, as with a LoRA, only few weights get gradients."""
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock

    torch.manual_seed(0)
    block: nn.Module = QwenImageTransformerBlock(dim=WIDTH, num_attention_heads=HEADS, attention_head_dim=HEAD_DIM)
    block.to(DEVICE, torch.bfloat16).requires_grad_(False)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name.endswith("bias") and ("attn" in name or "mlp" in name))
    return block


def inputs(images: int, *, masked: bool = False) -> Figures:
    """Returns the block's arguments for so many images; a mask hides the last half of the text."""
    mask = (torch.arange(TEXT, device=DEVICE) < TEXT // 2).expand(images, TEXT) if masked else None
    angles = (torch.randn(count, HEAD_DIM // 2, device=DEVICE) for count in (TOKENS, TEXT))
    return {
        "hidden_states": drawn(images, TOKENS, WIDTH),
        "encoder_hidden_states": drawn(images, TEXT, WIDTH),
        "encoder_hidden_states_mask": mask,
        "temb": drawn(images, WIDTH),
        "image_rotary_emb": tuple(torch.polar(torch.ones_like(angle), angle) for angle in angles),
    }


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def ms(work: Callable[[], Any], rounds: int = 10) -> float:
    """Returns the median milliseconds of a call, with the device's work; three calls before are not counted."""
    return 1000 * median([timed(work) for _ in range(3 + rounds)][3:])


def timed(work: Callable[[], Any]) -> float:
    """Returns the seconds of a call, with the device's work."""
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def ms_of_copy(target: Tensor, source: Tensor) -> float:
    """Returns the milliseconds of a copy, times 10^6: bytes divided by it are GB/s."""
    return ms(lambda: target.copy_(source, non_blocking=True), 3) * 1e6


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
