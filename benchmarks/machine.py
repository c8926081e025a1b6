"""Description of the machine that makes a measurement; numbers of different machines or days cannot be compared."""

import datetime
import os
import platform
from collections import Counter
from pathlib import Path

import torch


def machine_description() -> dict[str, str]:
    """Returns name → text: processor, cores, GPUs, versions, load average of the last minute, and date."""
    description = {"processor": processor(), "cores": str(os.cpu_count())}
    if torch.cuda.is_available():
        names = Counter(torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count()))
        description["GPUs"] = ", ".join(f"{count} x {name}" for name, count in names.items())
    description |= {"torch": torch.__version__, "Python": platform.python_version()}
    description["load average at the start"] = f"{os.getloadavg()[0]:.1f}"
    description["measured"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return description


def processor() -> str:
    """Returns the name of the processor; where Linux does not tell it, that of the machine type."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
