"""Test support, never shipped: it runs the official GPU wheels of vllm and vllm-omni on a machine with only a CPU.

vllm-omni has no CPU platform of its own but a documented hook for platforms from outside; `pyproject.toml` names these
two functions there.
"""


def platform() -> str:
    """The platform vllm runs on."""
    return "vllm_cpu_support.platforms.CpuTestPlatform"


def omni_platform() -> str:
    """The platform vllm-omni runs on."""
    return "vllm_cpu_support.omni_platform.OmniCpuTestPlatform"
