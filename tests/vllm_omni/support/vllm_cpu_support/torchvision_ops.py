"""Schemas of torchvision's CUDA operators, without which PyPI's torchvision cannot be imported beside a CPU torch.

The schemas are declared before torchvision is imported. A .pth file runs this module, also in spawned workers.
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
