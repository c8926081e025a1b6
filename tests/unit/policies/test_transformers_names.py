"""Tests of transformers' look for names in its model files."""

import importlib.util
import sys
from pathlib import Path

import pytest
import transformers
from transformers.utils import import_utils

from async_flowrl.policies.transformers_names import read_names_once


def test_the_names_of_all_models_are_read_once_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a second copy of transformers' module, which has read nothing yet, and a second import of its models."""
    spec = importlib.util.find_spec(import_utils.__name__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    folder = Path(transformers.__file__).parent / "models"
    own = again.define_import_structure.__wrapped__(str(folder / "__init__.py"))
    read = again.create_import_structure_from_path
    read.cache_clear()
    read(folder)
    before = read.cache_info().misses
    monkeypatch.setattr(transformers.utils, "import_utils", again)
    monkeypatch.setitem(sys.modules, import_utils.__name__, again)
    monkeypatch.setattr(transformers, "models", transformers.models)
    monkeypatch.delitem(sys.modules, "transformers.models")
    read_names_once()
    models = importlib.import_module("transformers.models")
    after = read.cache_info().misses
    assert before > 100 and after - before < 10, f"{before} folders exist; only those that were used are read again"
    assert again.define_import_structure(models.__file__) == own
    assert models.qwen2_5_vl.Qwen2_5_VLConfig.__name__ == "Qwen2_5_VLConfig"
    other = again.define_import_structure(str(folder / "gpt2/__init__.py"))
    assert any("modeling_gpt2" in part for part in other.values())
