"""Tests of the doctor's command line and of its report."""

import json
from pathlib import Path

import pytest
import torch

from async_flowrl.doctor import __main__ as doctor
from async_flowrl.doctor.checks import CHECKS
from async_flowrl.doctor.findings import FAILED, OK, Finding
from async_flowrl.doctor.report import Report
from async_flowrl.doctor.setting import Setting

VERSIONS = {"torch": "2.13.0", "NCCL of torch": "2.28.3", "driver": "580.1", "ray": "2.60.0"}


def report(name: str = "NVIDIA H100", *, quick: bool = False) -> Report:
    made = Report("async-flowrl doctor --gpu", "2026-01-02 03:04 UTC", Setting(2, name, quick, "", ""))
    made.checks["machine"] = [Finding("versions", OK, "torch 2.13.0", figures=VERSIONS)]
    made.checks["runs"] = [Finding("one_step_off twice", FAILED, "other weights", "see above", {"digests": ["a", "b"]})]
    made.seconds = {"machine": 1.0, "runs": 120.0}
    return made


def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert doctor.main(["--gpu", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("doctor: --gpu needs a CUDA device") and said.err.count("\n") == 1
    assert said.out == "" and not (tmp_path / "out").exists()


def test_without_options_it_looks_and_says_what_more_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said and "--gpu" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "--only", "run"], "did you mean 'runs'"),
        (["--quick"], "--quick belongs to --gpu"),
        (["--only", "runs"], "--only belongs to --gpu"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_every_check_runs_whatever_the_earlier_ones_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    monkeypatch.setattr(doctor, "supervise", lambda name, *_: [Finding(name, FAILED, "broken", "mend it")])
    assert doctor.main(["--gpu", "--out", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  failed")] == [f"{name}:" for name in CHECKS]
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert list(written["checks"]) == list(CHECKS)
    assert doctor.main(["--gpu", "--only", "runs", "--only", "machine", "--out", str(tmp_path)]) == 1
    assert list(json.loads((tmp_path / "doctor.json").read_text())["checks"]) == ["machine", "runs"]


def test_a_report_that_cannot_be_written_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "file").write_text("")
    assert doctor.main(["--gpu", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"doctor: --out {tmp_path / 'file'} cannot be written: Not a directory\n"


def test_an_interrupt_keeps_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str, *_: object) -> list[Finding]:
        if name == "machine":
            return [Finding(name, OK, "sound")]
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    monkeypatch.setattr(doctor, "supervise", interrupted)
    assert doctor.main(["--gpu", "--out", str(tmp_path)]) == 130
    assert list(json.loads((tmp_path / "doctor.json").read_text())["checks"]) == ["machine"]
    assert "doctor: interrupted" in capsys.readouterr().err


def test_the_report_is_for_people_and_for_programs(tmp_path: Path) -> None:
    report().write(tmp_path)
    text = (tmp_path / "doctor.md").read_text()
    assert text.startswith("# 2 × NVIDIA H100\n") and "1 ok, 0 warning, 1 failed, 0 skipped" in text
    assert "- **failed** one_step_off twice: other weights. *see above*" in text
    assert "| 2026-01-02 | 2 × NVIDIA H100 | torch 2.13.0, NCCL 2.28.3, driver 580.1 | 1 ok" in text
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert written["pretended"] is False
    assert written["checks"]["runs"]["findings"][0]["figures"] == {"digests": ["a", "b"]}


def test_a_pretended_device_is_named_first_and_makes_no_row() -> None:
    text = report("NVIDIA H100 (pretended)").markdown()
    assert text.split("\n\n")[2].startswith("**Pretended device") and "gpu_runs" not in text
    assert report("NVIDIA H100 (pretended)").as_json()["pretended"] is True
    assert "gpu_runs" not in report(quick=True).markdown()


def test_the_columns_of_a_row_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gpu_runs.md").read_text()
    assert "| date | devices | versions | findings | report |" in page
