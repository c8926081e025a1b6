"""Tests of the rows of `make prove`: whole weights are left out where the overrides cannot go with them."""

from pathlib import Path

import pytest

from benchmarks import prove

WHOLE, SHARES = "full weights are left out: ", "full weights in shares of 2 ranks are left out: "
BOTH = (WHOLE, SHARES)


@pytest.mark.parametrize(
    ("overrides", "folders", "said"),
    [
        ([], ["run", "whole", "shares"], []),
        (["tune=full"], ["run"], []),
        (["placement=shared"], ["run", "whole"], [SHARES + "placement=shared"]),
        (
            ["rollout.engine=vllm_omni"],
            ["run"],
            [each + "tune=full delivers whole weights" for each in BOTH],
        ),
        (["lora.path=adapters/old"], ["run"], [each + "lora.path=adapters/old is for" for each in BOTH]),
    ],
)
def test_rows_of_whole_weights_are_left_out_where_they_would_be_refused(
    capsys: pytest.CaptureFixture[str], overrides: list[str], folders: list[str], said: list[str]
) -> None:
    assert [family.folder for family in prove.families(overrides)] == folders
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(said)
    for line, begins in zip(lines, said, strict=True):
        assert line.startswith(begins)


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
