"""The CPU as a platform of vllm. It is imported while vllm is half imported, so it must not import vllm-omni."""

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum


class CpuTestPlatform(CpuPlatform):
    """Out of tree, so that every custom operator falls back to its PyTorch form."""

    _enum = PlatformEnum.OOT

    @classmethod
    def import_kernels(cls) -> None:
        """The wheel holds CUDA kernels only."""
