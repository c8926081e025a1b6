"""Check `machine`: versions of the software that matters on GPUs, and the devices as torch sees them."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from async_flowrl.doctor.facts import nvidia_smi
from async_flowrl.doctor.findings import FAILED, OK, SKIPPED, WARNING, Finding
from async_flowrl.doctor.setting import PRETENDED, Setting
from async_flowrl.observability.flops import device_peak

PACKAGES = ("async-flowrl", "torch", "diffusers", "transformers", "peft", "ray", "numpy")
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
"""Distributions that provide the module cupy."""
LEAST_CAPABILITY = (8, 0)
"""First compute capability whose tensor cores multiply bfloat16."""
MIN_FREE_SHARE = 0.9
"""Least free share of a device's memory; with less, another program uses the device."""
GIB = 2**30


def check(setting: Setting, seconds: float) -> Iterator[Finding]:
    """Yields findings on the versions, on each device, on access between devices, and on the known peak speed."""
    yield versions_finding(versions())
    devices = [device(index) for index in range(setting.devices)]
    yield from map(device_finding, devices)
    yield peers_finding(devices)
    yield peak()


def versions() -> dict[str, str]:
    """Returns name → version of what is installed."""
    numbers = {"Python": platform.python_version()}
    for package in (*PACKAGES, *CUPY):
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            continue
    numbers["torch"] = torch.__version__
    if torch.version.cuda is not None:
        numbers["CUDA of torch"] = torch.version.cuda
        numbers["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    if (nccl := nccl_version()) is not None:
        numbers["NCCL of torch"] = nccl
    if (driver := driver_version()) is not None:
        numbers["driver"] = driver
    return numbers


def nccl_version() -> str | None:
    """Returns the version of torch's own NCCL; None without one."""
    if torch.version.cuda is None or not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver; None if nvidia-smi is missing, fails or does not answer."""
    return next(iter(nvidia_smi("driver_version")), "").strip() or None


def versions_finding(numbers: dict[str, str]) -> Finding:
    """Reports the versions; warns if torch has CUDA but no NCCL."""
    sentence = ", ".join(f"{name} {number}" for name, number in numbers.items())
    if torch.cuda.is_available() and not dist.is_nccl_available():
        advice = "install a torch with NCCL, or use checkpoint_engine.transport=gloo or object_store"
        return Finding("versions", WARNING, f"{sentence}; this torch has no NCCL", advice, numbers)
    return Finding("versions", OK, sentence, figures=numbers)


def device(index: int) -> dict[str, Any]:
    """Returns torch's facts on one device, memory in bytes; `numa` and `peers` are None if unknown."""
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "index": index,
        "name": torch.cuda.get_device_name(index),
        "capability": list(torch.cuda.get_device_capability(index)),
        "memory": total,
        "free": free,
        "numa": numa_node(properties),
        "peers": peers(index),
    }


def numa_node(properties: Any) -> int | None:
    """Returns the NUMA node (host memory near the device) from sysfs; None if the kernel or torch does not tell."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(properties, name) for name in names):
        return None
    domain, bus, slot = (getattr(properties, name) for name in names)
    file = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node")
    node = int(file.read_text()) if file.is_file() else -1
    return node if node >= 0 else None


def peers(index: int) -> list[int] | None:
    """Returns the devices whose memory this one can read directly; None if torch has no CUDA."""
    if torch.version.cuda is None:
        return None
    others = (other for other in range(torch.cuda.device_count()) if other != index)
    return [other for other in others if torch.cuda.can_device_access_peer(index, other)]


def device_finding(facts: dict[str, Any]) -> Finding:
    """Reports a device: failed without bfloat16 tensor cores, a warning if another program uses its memory."""
    capability = ".".join(map(str, facts["capability"]))
    sentence = (
        f"{facts['name']}, {facts['memory'] / GIB:.1f} GiB, {facts['free'] / GIB:.1f} free, capability {capability}"
    )
    sentence += f", NUMA node {facts['numa']}" if facts["numa"] is not None else ""
    name = f"device {facts['index']}"
    if tuple(facts["capability"]) < LEAST_CAPABILITY:
        return Finding(name, FAILED, sentence, "bfloat16 needs capability 8.0 (Ampere) or newer", facts)
    if PRETENDED in facts["name"].lower():
        return Finding(name, WARNING, sentence, "no figure of this report says anything about a GPU", facts)
    if facts["free"] < MIN_FREE_SHARE * facts["memory"]:
        return Finding(name, WARNING, sentence, "something else holds memory there: see nvidia-smi, end it", facts)
    return Finding(name, OK, sentence, figures=facts)


def peers_finding(devices: list[dict[str, Any]]) -> Finding:
    """Warns if a device cannot read another one's memory directly; NCCL then copies through host memory."""
    if len(devices) < 2:
        return Finding("peer access", SKIPPED, "one device", "needs two")
    if any(each["peers"] is None for each in devices):
        return Finding("peer access", SKIPPED, "this torch is no CUDA build", "needs one")
    missing = [
        f"{each['index']} → {other['index']}"
        for each in devices
        for other in devices
        if other is not each and other["index"] not in each["peers"]
    ]
    if missing:
        advice = "NCCL copies through host memory there, which is slower; see nvidia-smi topo -m"
        return Finding("peer access", WARNING, f"none from {', '.join(missing)}", advice)
    return Finding("peer access", OK, f"between all {len(devices)} devices")


def peak() -> Finding:
    """Reports the device's peak speed, of which MFU (model FLOPs utilisation) is the reached share."""
    rate = device_peak()
    if rate is None:
        advice = "set hardware.peak_tflops in your runs to the dense bfloat16 figure of the data sheet"
        return Finding("known peak", WARNING, "the device's name is none of those known, so MFU is not", advice)
    figures = {"flops_per_second": rate}
    return Finding(
        "known peak", OK, f"{rate / 1e12:.0f} TFLOP/s, dense bfloat16, by the device's name", figures=figures
    )
