"""Tests of transformers' look for names in its model files."""

import json
import subprocess
import sys

from tests.integration.runs import LIMIT, ROOT

SCRIPT = """
import json
from pathlib import Path
import transformers
from transformers.utils import import_utils

read = import_utils.create_import_structure_from_path
folder = Path(transformers.__file__).parent / "models"
own = import_utils.define_import_structure.__wrapped__(str(folder / "__init__.py"))
read.cache_clear()
read(folder)
before = read.cache_info().misses
from async_flowrl.policies.transformers_names import read_names_once
read_names_once()
import transformers.models
same = import_utils.define_import_structure(transformers.models.__file__) == own
named = transformers.models.qwen2_5_vl.Qwen2_5_VLConfig.__name__
other = import_utils.define_import_structure(str(folder / "gpt2/__init__.py"))
found = any("modeling_gpt2" in part for part in other.values())
print(json.dumps([before, read.cache_info().misses, same, named, found]))
"""


def test_the_names_of_all_models_are_read_once_and_are_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    before, after, same, named, other = json.loads(done.stdout)
    assert after - before < 10, f"{before} folders exist; only those that were used are read again"
    assert same and named == "Qwen2_5_VLConfig" and other
