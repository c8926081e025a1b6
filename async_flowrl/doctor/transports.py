"""Check `transports`: delivery of LoRA weights inside this process on the device, and between two processes of Ray.

A delivery stages a version (copies it for sending), seals it (computes digests), sends it, verifies it and activates
it. Between processes, `python -m benchmarks.delivery` times this and the transport alone. NCCL needs one device
per process; on a single device only a group with one member is opened.
"""

import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from async_flowrl.doctor.findings import FAILED, OK, SKIPPED, Finding, failed
from async_flowrl.doctor.processes import run_within
from async_flowrl.doctor.setting import Setting
from checkpoint_engine import EngineError, Publisher, Receiver
from checkpoint_engine.collective import CollectiveSender
from checkpoint_engine.process_group import Epoch
from checkpoint_engine.transports import GLOO, NCCL, OBJECT_STORE, PYNCCL, make_member, resolve_transport

MEGABYTE = 10**6
TENSORS = 32
"""Number of tensors of the LoRA that is delivered."""
DEVICE_COPIES = 8
"""Largest number of payload-sized buffers on a device; sender and receiver share it in the first part."""
HOST_COPIES = 16
"""Largest number of payload-sized buffers in host memory, Ray's object store included."""
OPEN_SECONDS = 60.0
"""Time limit for opening a group."""
OTHERS = "needed for that transport alone"
ADVICE = {
    OBJECT_STORE: "this transport has nothing below it: send the report",
    GLOO: "set rollout.environment and trainer.environment to {GLOO_SOCKET_IFNAME: …}, or use object_store",
    NCCL: "run again with NCCL_DEBUG=INFO in the environment; until it works, use transport=object_store",
    PYNCCL: "see docs/checkpoint_engine.md for what it needs; until it works, use transport=nccl",
}


def check(setting: Setting, seconds: float) -> Iterator[Finding]:
    """Yields the delivery on the device, a group of one per NCCL transport, and each transport between processes."""
    size = megabytes(setting)
    until = time.monotonic() + seconds
    yield on_the_device(size, setting.sizes.rounds)
    for transport in (NCCL, PYNCCL):
        yield alone(transport, size)
    for transport in (OBJECT_STORE, GLOO, NCCL, PYNCCL):
        yield between_actors(setting, transport, size, until - time.monotonic())


def megabytes(setting: Setting) -> float:
    """Returns the size of the delivered LoRA in MB: that of the sizes, or less if the device or the host lacks room."""
    free = torch.cuda.mem_get_info(0)[0] / DEVICE_COPIES
    host = psutil.virtual_memory().available / HOST_COPIES
    return float(round(min(setting.sizes.adapter_megabytes, free / MEGABYTE, host / MEGABYTE), 1))


def adapter(size: float) -> dict[str, torch.Tensor]:
    """Returns 32 float32 tensors on the first device, of `size` MB together."""
    rows = max(1, int(size * MEGABYTE) // (TENSORS * 64 * 4))
    return {f"t{i:02d}": torch.full((rows, 64), float(i), device="cuda:0") for i in range(TENSORS)}


def on_the_device(size: float, rounds: int) -> Finding:
    """Times the parts of a delivery: stage (the trainer waits), seal, receive, and activate (the rollout waits)."""
    source = adapter(size)
    publisher = Publisher(source, retain=1)
    receiver = Receiver({name: torch.zeros_like(tensor) for name, tensor in source.items()}, capacity=1)
    spare = torch.empty(publisher.layout.nbytes, dtype=torch.uint8, device="cuda:0")
    other = torch.empty_like(spare)
    taken: dict[str, list[float]] = {}
    for version in range(rounds + 1):
        parts: Mapping[str, Callable[[], Any]] = {
            "copy": partial(spare.copy_, other),
            "stage": partial(publisher.stage, version),
            "seal": partial(publisher.seal, version),
            "receive": partial(hand_over, publisher, receiver, version),
            "activate": partial(receiver.activate, "policy", version),
        }
        for name, work in parts.items():
            taken.setdefault(name, []).append(timed(work))
    seconds = {name: median(values[1:]) for name, values in taken.items()}
    name = "delivery on the device"
    if receiver.live_digest() != publisher.payload(rounds)[0].digest:
        return Finding(name, FAILED, "the bytes that were activated are not those that were staged", "send the report")
    rate = {part: publisher.layout.nbytes / 1e9 / value for part, value in seconds.items()}
    sentence = ", ".join(f"{part} {1000 * value:.1f} ms ({rate[part]:.1f} GB/s)" for part, value in seconds.items())
    return Finding(name, OK, f"{size:g} MB: {sentence}", figures={"megabytes": size, "seconds": seconds})


def hand_over(publisher: Publisher, receiver: Receiver, version: int) -> None:
    receiver.receive(*publisher.payload(version))


def timed(work: Callable[[], Any]) -> float:
    """Returns the seconds until the device has finished the work."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def alone(transport: str, size: float) -> Finding:
    """Opens a group whose only member is the sender and broadcasts in it: shows that the library loads and answers."""
    name = f"group of one by {transport}"
    if (missing := lacking(transport)) is not None:
        return Finding(name, SKIPPED, missing, OTHERS)
    publisher = Publisher(adapter(size), retain=1)
    sender = CollectiveSender(publisher, make_member(transport, torch.device("cuda", 0)))
    host, port = sender.address()
    try:
        opening = timed(lambda: sender.open(Epoch(0, secrets.token_hex(8), host, port, 1, OPEN_SECONDS)))
        publisher.stage(0)
        sender.ready(0, publisher.draft(0))
        sending = timed(lambda: sender.send(publisher.draft(0)))
    except EngineError as error:
        return failed(name, error, ADVICE[transport])
    finally:
        sender.abort()
    figures = {"open_seconds": opening, "send_seconds": sending}
    return Finding(
        name, OK, f"opened in {opening:.2f} s, {size:g} MB sealed and sent in {sending:.2f} s", figures=figures
    )


def lacking(transport: str) -> str | None:
    """Returns why a transport's library cannot be used here; None if it can."""
    try:
        resolve_transport(transport, "cuda")
    except ValueError as error:
        return str(error)
    return None


def between_actors(setting: Setting, transport: str, size: float, seconds: float) -> Finding:
    """Times a sender and a receiver in two processes, with NCCL on two devices."""
    name = f"transport {transport}"
    if transport in (NCCL, PYNCCL) and setting.devices < 2:
        return Finding(name, SKIPPED, "NCCL refuses two processes on one device", "needs two devices")
    if (missing := lacking(transport)) is not None:
        return Finding(name, SKIPPED, missing, OTHERS)
    if not Path("benchmarks/delivery").is_dir():
        return Finding(name, SKIPPED, "benchmarks/delivery is not here", "run it in the repository")
    if setting.quick and transport != (NCCL if setting.devices > 1 else OBJECT_STORE):
        return Finding(name, SKIPPED, "left out by --quick", "needs the check without it")
    if seconds <= 0:
        return Finding(name, FAILED, "the check's time was used up before", "run `doctor --gpu --only transports`")
    out = setting.folder("transports") / f"{transport}.json"
    command = [sys.executable, "-m", "benchmarks.delivery", "--megabytes", str(size), "--receivers", "1"]
    command += ["--transports", transport, "--repeats", str(setting.sizes.rounds), "--kills", "0", "--out", str(out)]
    log = Path(setting.logs) / f"transport_{transport}.log"
    ended = run_within(command, seconds, log, environment=setting.environment())
    if ended.code != 0:
        why = f"not done within {seconds:.0f} s" if ended.code is None else ended.last_words()
        return Finding(name, FAILED, why, f"{ADVICE[transport]}; see {log.name}")
    return delivered(name, json.loads(out.read_text(encoding="utf-8")), ADVICE[transport])


def delivered(name: str, result: Mapping[str, Any], advice: str) -> Finding:
    """Turns the benchmark's result into a finding, in GB/s."""
    if not result["cells"]:
        return Finding(name, SKIPPED, "; ".join(result["skipped"]), "not measured")
    (cell,) = result["cells"]
    gigabytes = cell["megabytes"] / 1000
    rates = {what: gigabytes / cell[f"{what}_seconds"] for what in ("delivery", "primitive")}
    sentence = (
        f"{cell['megabytes']:g} MB in {cell['delivery_seconds']:.3f} s ({rates['delivery']:.2f} GB/s; the raw "
        f"primitive {rates['primitive']:.2f} GB/s), trainer stalled {1000 * cell['stall_seconds']:.1f} ms"
    )
    if cell["stats"]["fallbacks"]:
        return Finding(name, FAILED, f"{sentence}; {cell['stats']['fallbacks']} deliveries fell back", advice, cell)
    return Finding(name, OK, sentence, figures=cell)
