"""PyPI's torchvision is linked against CUDA; next to a CPU torch its import stops at operators nobody here calls.

Declaring their schemas beforehand lets the import through. Run from a .pth file, so that spawned workers have it too.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_declared: list[Any] = []


class _DeclaresOperators(MetaPathFinder):
    """Finds nothing; the first import of torchvision only passes by."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and not _declared:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _declared.append(library)
        return None


sys.meta_path.insert(0, _DeclaresOperators())
