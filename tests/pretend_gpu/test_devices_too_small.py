"""Test of a run on devices that cannot hold its weights: it is refused before any weights are loaded."""

import os
from pathlib import Path
from unittest import mock

import pytest

from tests.integration.runs import finish, start

pytestmark = pytest.mark.timeout(400)
SMALL = {"PRETEND_CUDA_GIB": "0.004"}
"""Less than the weights of the tiny model."""


def test_weights_larger_than_the_device_are_refused_with_what_would_make_them_fit(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, SMALL):
        process = start(tmp_path / "run", "one_step_off", "model.dtype=float32", "model.tiny.layers=2")
    _, said = finish(process, 2)
    assert "a trainer rank holds" in said and "of weights, optimizer and versions alone" in said
    assert "it would fit with" in said and "allow_oom=true tries anyway" in said
    assert "Traceback" not in said
