"""Package that a process with pretended CUDA devices imports; tests/pretend_gpu/README.md describes it."""

import sys

if "torch" not in sys.modules:
    import torch  # noqa: F401 - brings all this up, in the right order
