"""Test of the search for a browser: a program named chromium that only explains how to install it does not count."""

from pathlib import Path

import pytest

from tests.support.chromium import starts


@pytest.mark.parametrize(("program", "is_one"), [("echo Chromium 140", True), ("exit 1", False)])
def test_only_a_browser_that_starts_counts(tmp_path: Path, program: str, is_one: bool) -> None:
    path = tmp_path / "chromium"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    assert starts(str(path)) is is_one and not starts(str(tmp_path / "none"))
