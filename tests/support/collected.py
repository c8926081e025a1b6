"""Imported last by the process from which the test processes are forked (forked.py): collects the tests of ARGUMENTS.

The forks collect them again, but find their modules imported: a third of the time.
"""

import json
import os

import pytest

from tests.support.forked import ARGUMENTS

pytest.main(["--collect-only", "-qq", "-n0", "-p", "no:cacheprovider", *json.loads(os.environ[ARGUMENTS])])
