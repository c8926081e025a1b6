"""Imported last by the process from which the test processes are forked (forked.py): collects the tests of ARGUMENTS.

The forks collect them again, but find their modules imported: a third of the time. Those of tests/gpu, which ask for a
GPU when they are imported, are left to the forks: no process can use CUDA if the one that it was forked from has.
"""

import json
import os

import pytest

from tests.support.forked import ARGUMENTS

pytest.main(
    [
        "--collect-only",
        "-qq",
        "-n0",
        "-p",
        "no:cacheprovider",
        "--ignore-glob=*/tests/gpu/*",
        *json.loads(os.environ[ARGUMENTS]),
    ]
)
