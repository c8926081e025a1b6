"""Tests of checks in processes of their own: limits, crashes, earlier findings, and processes left behind."""

from pathlib import Path

import psutil
import pytest

from async_flowrl.doctor import checks
from async_flowrl.doctor.checks import Check, supervise
from async_flowrl.doctor.findings import FAILED, OK, SKIPPED, WARNING, Finding, exit_code, failed
from async_flowrl.doctor.setting import FULL, SMALL, Setting

ROOT = Path(__file__).parents[3]
PROBES = "tests.unit.doctor.doctor_probes"


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Setting(2, "NVIDIA H100", quick=True, work=str(tmp_path), logs=str(tmp_path))


def probe(name: str, monkeypatch: pytest.MonkeyPatch, seconds: float = 60.0) -> None:
    """Puts one of the probes in the place of the check `machine`."""
    monkeypatch.setitem(checks.CHECKS, "machine", Check(f"{PROBES}:{name}", "a probe", seconds, seconds))


def test_what_a_check_finds_comes_back_in_order(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    probe("sound", monkeypatch)
    first, second = supervise("machine", setting, 1000.0)
    assert (first.name, second.sentence) == ("first", "said then")
    assert first.figures["seconds"] <= 60.0 - checks.RESERVE_SECONDS


def test_a_check_that_crashes_keeps_what_it_found(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    probe("raises", monkeypatch)
    before, broken = supervise("machine", setting, 1000.0)
    assert before == Finding("before", OK, "was found")
    assert broken.status == FAILED and "no kernel image is available" in broken.sentence
    assert broken.advice == "see machine.log"


def test_a_check_that_hangs_is_ended_with_all_it_started(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log says where it was, and not even a process in a session of its own stays behind."""
    probe("hangs", monkeypatch, seconds=20.0)
    before, late = supervise("machine", setting, 1000.0)
    assert before.name == "before"
    assert late.status == FAILED and late.sentence == "not done within 20 s"
    assert "in hangs" in (Path(setting.logs) / "machine.log").read_text()
    grandchild = int((Path(setting.work) / "grandchild").read_text())
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


def test_a_check_for_which_no_time_is_left_says_so(setting: Setting) -> None:
    (finding,) = supervise("pools", setting, checks.RESERVE_SECONDS)
    assert finding.status == SKIPPED and "--only pools" in finding.advice


def test_limits_are_those_of_the_pass_and_never_more_than_is_left() -> None:
    check = Check("x:y", "", 100.0, 10.0)
    assert check.limit(quick=False, left=1000.0) == 100.0
    assert check.limit(quick=True, left=1000.0) == 10.0
    assert check.limit(quick=False, left=30.0) == 30.0


def test_the_setting_travels_and_says_how_large_the_work_is(setting: Setting, tmp_path: Path) -> None:
    setting.write(tmp_path / "setting.json")
    assert Setting.read(tmp_path / "setting.json") == setting
    assert setting.sizes == SMALL and not setting.pretended
    assert Setting(2, "NVIDIA H100", False, "", "").sizes == FULL
    rehearsed = Setting(2, "NVIDIA H100 80GB HBM3 (pretended)", False, "", "")
    assert rehearsed.pretended and rehearsed.sizes == SMALL


def test_processes_of_a_check_build_their_models_in_the_scratch_folder(setting: Setting, tmp_path: Path) -> None:
    assert setting.environment()["ASYNC_FLOWRL_CACHE"] == str(tmp_path / "models")
    assert setting.environment()["HF_HUB_OFFLINE"] == "1"


def test_only_a_failure_is_an_exit_code() -> None:
    each = {status: Finding("x", status, "y") for status in (OK, WARNING, SKIPPED, FAILED)}
    assert exit_code([each[OK], each[WARNING], each[SKIPPED]]) == 0
    assert exit_code(each.values()) == 1
    with pytest.raises(ValueError, match="got 'fine'"):
        Finding("x", "fine", "y")


def test_a_failure_says_what_the_error_says_in_one_line() -> None:
    assert failed("x", RuntimeError("two\nlines"), "do that").line() == "failed   x: two lines; do that"
    assert failed("x", TimeoutError(), "").line() == "failed   x: TimeoutError"
