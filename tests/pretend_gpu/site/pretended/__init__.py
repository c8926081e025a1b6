"""What a process with pretended CUDA devices runs: see tests/pretend_gpu/README.md."""

import sys

if "torch" not in sys.modules:
    import torch  # noqa: F401 - brings all this up, in the right order
