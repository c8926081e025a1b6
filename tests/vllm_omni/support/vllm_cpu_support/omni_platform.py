"""The CPU as a platform of vllm-omni: gloo, float32, no kernels of its own."""

import psutil
import torch
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from vllm_cpu_support.platforms import CpuTestPlatform


class OmniCpuTestPlatform(OmniPlatform, CpuTestPlatform):
    """One device without memory of its own."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        return "vllm_cpu_support.attention.CpuAttentionBackend"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        """Called where a worker process is made, just before it starts its output thread."""
        from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc

        from vllm_cpu_support.output_thread import pack_outputs

        WorkerProc._async_output_loop = pack_outputs
        return super().get_diffusion_worker_cls()

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one."""

    @classmethod
    def synchronize(cls) -> None:
        """Everything is done when it returns."""

    @classmethod
    def empty_cache(cls) -> None:
        """There is none."""

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        """None are kept."""

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
