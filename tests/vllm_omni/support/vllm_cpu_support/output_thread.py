"""Replacement of vllm-omni's output thread, which has nothing to copy from a device on a CPU."""

from typing import Any

from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm


def pack_outputs(worker: Any) -> None:
    """`WorkerProc._async_output_loop` without the stream."""
    while (item := worker._async_output_queue.get()) is not None:
        output, number, _ = item
        pack_diffusion_output_shm(output)
        worker._enqueue_result(
            AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id=number, output=output)
        )
        with worker._async_output_done:
            worker._async_output_pending = max(0, worker._async_output_pending - 1)
            worker._async_output_done.notify_all()
