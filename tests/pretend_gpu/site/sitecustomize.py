"""Start-up module of every Python with this folder on its path, Ray's workers included: gives torch CUDA devices."""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class WithDevices(importlib.abc.Loader):
    """Loads torch as its own loader does, the pretended device before it and what stands in for torch.cuda after it."""

    def __init__(self, own: importlib.abc.Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from pretended.library import load

        load()  # before torch, which asks for its CUDA hooks once
        self._own.exec_module(module)
        import pretended.install  # noqa: F401


class TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch, once, where it is."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = WithDevices(spec.loader)
        return spec


if os.environ.get("PRETEND_CUDA_DEVICES"):
    sys.meta_path.insert(0, TorchFinder())
