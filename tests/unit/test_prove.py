"""Tests of the rows of `make prove`: whole weights are left out where the overrides cannot go with them."""

from pathlib import Path

import pytest

from async_flowrl import prove


@pytest.mark.parametrize(
    ("overrides", "families", "said"),
    [
        ([], 2, ""),
        (["tune=full"], 1, ""),
        (["rollout.engine=vllm_omni"], 1, "full weights are left out: tune=full delivers whole weights"),
        (["lora.path=adapters/old"], 1, "full weights are left out: lora.path=adapters/old is for tune=lora"),
    ],
)
def test_rows_of_whole_weights_are_left_out_where_they_would_be_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], overrides: list[str], families: int, said: str
) -> None:
    for case in ("undisturbed", "delayed", "killed", "rank_killed", "worker_killed"):
        monkeypatch.setattr(prove, case, lambda folder, overrides: "ab" * 32)
    assert len(prove.prove(Path("out"), overrides)) == families
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("full weights are left out")]
    assert len(found) == bool(said) and all(line.startswith(said) for line in found)
