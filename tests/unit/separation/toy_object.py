"""A small object for workers of tests, with methods for every kind of misbehaviour."""

import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from separation.group import Unusable

Array = npt.NDArray[np.float32]


class Unpicklable(Exception):
    """Carries a lock, so it can't travel."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Toy:
    """Remembers what it was told."""

    def __init__(self, *, index: int, name: str, greeting: str = "hello", fail: str = "") -> None:
        if fail:
            raise RuntimeError(fail)
        self.index, self.name, self.greeting = index, name, greeting
        self.seen: list[Any] = []
        self.gate = threading.Event()

    def hello(self) -> str:
        return f"{self.greeting} from {self.name} ({self.index})"

    def note(self, value: Any, pause: float = 0.0) -> list[Any]:
        """Appends after a pause."""
        time.sleep(pause)
        self.seen.append(value)
        return list(self.seen)

    def wait(self) -> str:
        """Blocks until `release` is called in another lane."""
        if not self.gate.wait(30):
            raise TimeoutError("nobody released")
        return "released"

    def release(self) -> None:
        self.gate.set()

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fail(self, message: str) -> None:
        raise KeyError(message)

    def give_up(self, message: str) -> None:
        raise Unusable(message)

    def fail_strangely(self) -> None:
        raise Unpicklable("a lock inside")

    def return_lock(self) -> object:
        return threading.Lock()

    def split(self, count: int) -> tuple[dict[str, int], Array, Array]:
        return {"count": count}, np.full(count, 2.0, np.float32), np.full(count, 3.0, np.float32)

    def split_unevenly(self, count: int) -> tuple[None, Array, Array]:
        return None, np.full(1, 2.0, np.float32), np.full(count, 3.0, np.float32)

    def total(self, *arrays: Array) -> float:
        return float(sum(array.sum() for array in arrays))

    def writeable(self, array: Array) -> bool:
        return bool(array.flags.writeable)

    def all_reduce(self) -> float:
        """The sum over the process group of rank + 1."""
        import torch
        import torch.distributed as dist

        value = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(value)
        return value.item()
