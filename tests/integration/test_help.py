"""Tests of `async-flowrl <verb> --help`: every verb answers quickly and starts nothing."""

import sys
from pathlib import Path

import pytest

from async_flowrl import __main__ as verbs


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_every_verb_says_how_it_is_used(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["async-flowrl", verb, "--help"])
    with pytest.raises(SystemExit) as end:
        sys.exit(verbs.main())
    said = capsys.readouterr()
    assert end.value.code in (0, None), said.err
    assert f"usage: async-flowrl {verb} " in said.out or f"usage: python -m {verbs.VERBS[verb][0]} " in said.out
    assert len(said.out.splitlines()) >= 3 and not said.err
    assert not list(tmp_path.iterdir())
