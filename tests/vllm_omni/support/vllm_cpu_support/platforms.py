"""The CPU as vllm sees it. Imported while vllm itself is half imported: nothing of vllm-omni may be named here."""

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum


class CpuTestPlatform(CpuPlatform):
    """Out of tree, so that every custom operator falls back to its PyTorch form."""

    _enum = PlatformEnum.OOT

    @classmethod
    def import_kernels(cls) -> None:
        """The wheel holds CUDA kernels only."""
