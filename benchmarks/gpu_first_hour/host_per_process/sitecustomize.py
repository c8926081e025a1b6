"""Makes every Python process a host of its own for NCCL, which otherwise refuses two ranks on one card."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

PREFIX = "one-card-"
if os.environ.get("NCCL_HOSTID", PREFIX).startswith(PREFIX):  # not set, or inherited from the process before
    os.environ["NCCL_HOSTID"] = f"{PREFIX}{os.getpid()}"

# Python imports only the first sitecustomize of its path.
_here = os.path.dirname(os.path.abspath(__file__))
_next = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != _here])
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
