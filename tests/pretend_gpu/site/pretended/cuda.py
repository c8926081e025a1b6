"""The part of torch.cuda that the project uses, for pretended devices, over torch's own streams and events."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from pretended.library import call

GIB = 2**30
DEFAULT_GIB = 79.6
Where = torch.device | str | int | None


def index_of(device: Where) -> int:
    """Of a device as torch.cuda's functions take it; without index the current one. Raises ValueError for a CPU."""
    if device is None:
        return int(torch._C._accelerator_getDeviceIndex())
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return index_of(None) if device.index is None else device.index


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> "Event":
        made: Event = super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)
        made.recorded = False
        return made

    recorded: bool

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(current_stream() if stream is None else stream)
        self.recorded = True

    def wait(self, stream: torch.Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        return bool(super().query()) if self.recorded else True

    def synchronize(self) -> None:
        if self.recorded:
            super().synchronize()


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device: Where = None, priority: int = 0, **identity: Any) -> "Stream":
        if identity:
            return super().__new__(cls, **identity)
        return super().__new__(cls, device=torch.device("cuda", index_of(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)

    def wait_event(self, event: torch.Event) -> None:
        if getattr(event, "recorded", True):
            super().wait_event(event)

    def wait_stream(self, stream: torch.Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        self._before = current_stream(self.device)
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._before)


def _typed(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Where = None) -> Stream:
    return _typed(torch._C._accelerator_getStream(index_of(device)))


def default_stream(device: Where = None) -> Stream:
    return Stream(stream_id=0, device_index=index_of(device), device_type=1)


def set_stream(stream: torch.Stream) -> None:
    torch._C._accelerator_setStream(stream)


@contextlib.contextmanager
def stream(wanted: torch.Stream | None) -> Iterator[None]:
    if wanted is None:
        yield
        return
    before = current_stream(wanted.device)
    with device(wanted.device):
        set_stream(wanted)
        try:
            yield
        finally:
            set_stream(before)


class device:  # noqa: N801 - torch's name
    """torch.cuda.device: the current device for the length of a block."""

    def __init__(self, which: Where) -> None:
        self.index = index_of(which)

    def __enter__(self) -> None:
        self._before = index_of(None)
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


def set_device(which: Where) -> None:
    torch._C._accelerator_setDeviceIndex(index_of(which))


class Properties:
    """Of the card that is pretended."""

    name, major, minor, multi_processor_count, warp_size = "NVIDIA H100 80GB HBM3 (pretended)", 9, 0, 132, 32
    gcnArchName = ""  # noqa: N815 - torch's name
    total_memory = int(float(os.environ.get("PRETEND_CUDA_GIB", DEFAULT_GIB)) * GIB)


def live_bytes(device: Where = None) -> int:
    return int(str(call("live_bytes", index_of(device))))


def peak_bytes(device: Where = None) -> int:
    return int(str(call("peak_bytes", index_of(device))))


_resize = torch.UntypedStorage.resize_


def resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """UntypedStorage.resize_, by which FSDP frees and takes back what it gathered."""
    faking = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if storage.device.type != "cuda" or faking:
        return _resize(storage, size)
    call("resize", storage._cdata, storage.device.index or 0, size)
    return storage


def install() -> None:
    """Puts all this in torch.cuda's place."""
    cuda: Any = torch.cuda
    count = int(str(call("device_count")))
    state: dict[str, Any] = {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: False,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
        "current_device": lambda: index_of(None),
        "synchronize": lambda device=None: torch._C._accelerator_synchronizeDevice(index_of(device)),
        "get_device_name": lambda device=None: Properties.name,
        "get_device_properties": lambda device=None: Properties,
        "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
    }
    memory: dict[str, Any] = {
        "mem_get_info": lambda device=None: (Properties.total_memory - live_bytes(device), Properties.total_memory),
        "memory_allocated": live_bytes,
        "memory_reserved": live_bytes,
        "max_memory_allocated": peak_bytes,
        "max_memory_reserved": peak_bytes,
        "reset_peak_memory_stats": lambda device=None: call("reset_peak", index_of(device)),
        "empty_cache": lambda: None,
    }
    random: dict[str, Any] = {
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    }
    own: dict[str, Any] = {
        f.__name__: f for f in (Event, Stream, current_stream, default_stream, set_stream, stream, device, set_device)
    }
    for name, value in {**state, **memory, **random, **own}.items():
        setattr(cuda, name, value)
    torch._C._accelerator_setAllocatorSettings = lambda env: os.environ.update(PYTORCH_ALLOC_CONF=env)
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign, assignment]
