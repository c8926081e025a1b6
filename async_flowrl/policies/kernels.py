"""Choice of a network's kernels: deterministic ones, diffusers' attention backends, and torch.compile per block."""

import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from async_flowrl.config.error_text import unknown_name
from async_flowrl.policies.pipeline import PipelinePolicy

# Times that the code of one kind of block may be compiled in a process: with and without gradients, for one row and for
# several, and for whatever else torch finds new. torch's own limit, 8, would be shared by trainer rank and rollout
# worker.
MAX_COMPILATIONS = 64


class TooManyCompilations(RuntimeError):
    """A block would have to be compiled more than MAX_COMPILATIONS times."""


def repeatable_kernels() -> None:
    """Makes this process use only CUDA kernels that give the same bits for the same input; call it before any other.

    Afterwards torch raises RuntimeError for an operation without such a kernel, and names it.
    """
    if not torch.cuda.is_available():
        return
    # cuBLAS reads it when it creates its first workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    # Filling only helps to find reads of uninitialised memory, and costs time for every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def use_attention(transformer: nn.Module, name: str) -> None:
    """Sets diffusers' attention backend `name`. Raises ValueError as `check_attention`, and if it does not run here."""
    check_attention(transformer, name)
    try:
        cast("Any", transformer).set_attention_backend(name)
    except (RuntimeError, ImportError, ValueError) as error:
        raise ValueError(f"model.attention_backend={name} cannot be used: {error}") from error


def check_attention(transformer: nn.Module, name: str) -> None:
    """Raises ValueError for a name that diffusers does not know, and if it cannot switch the network's attention."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    backends = [backend.value for backend in AttentionBackendName]
    if name not in backends:
        raise ValueError(unknown_name("model.attention_backend", name, backends))
    processors = [getattr(module, "processor", None) for module in transformer.modules()]
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        kind = type(transformer).__name__
        raise ValueError(f"model.attention_backend={name} has no effect on {kind}: diffusers does not dispatch it")


def compile_blocks(policy: PipelinePolicy, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compiles each block in place with torch.compile, so names of parameters stay."""
    # Call it after gradient checkpointing is set up and before FSDP shards the network. The code is compiled for any
    # number of images, any image size and any length of text: by torch's default the first shapes of a process would
    # get code of their own, so the bits of an image would depend on what was made before it.
    for block in policy.blocks:
        block.compile(backend=backend, dynamic=True)
        block._compiled_call_impl = _never_eager(cast("Callable[..., Any]", block._compiled_call_impl))


def _never_eager(compiled: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch.fx.experimental import _config as shapes

    def call(*args: Any, **kwargs: Any) -> Any:
        if not config.fail_on_recompile_limit_hit:
            config.recompile_limit, config.fail_on_recompile_limit_hit = MAX_COMPILATIONS, True
            shapes.use_duck_shape = False  # By default the code for a square image would be for squares alone.
        try:
            return compiled(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise TooManyCompilations(
                f"a block was compiled {MAX_COMPILATIONS} times in this process and came with something new again "
                "(TORCH_LOGS=recompiles says what); torch would go on without compiling it, which rounds differently: "
                "set trainer.compile=false and rollout.compile=false"
            ) from error

    return call
