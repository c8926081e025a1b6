"""Tests of the rows of `make prove`: whole weights are left out where the overrides cannot go with them."""

from pathlib import Path

import pytest

from benchmarks import prove


@pytest.mark.extended
def test_the_digests_of_every_family_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose digest differs from the others' of its family, and from those alone."""
    differs = ""

    def case(folder: Path, overrides: list[str], **_: int) -> str:
        return folder.name if folder.name == differs else folder.name.partition("_")[0]

    for name in ("undisturbed", "delayed", "killed", "rank_killed", "share_killed"):
        monkeypatch.setattr(prove, name, case)
    assert prove.main([]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "  (" in line]
    assert len(lines) == 9
    for differs in ("run_3", "whole_2", "shares_1"):
        assert prove.main([]) == 1, differs
