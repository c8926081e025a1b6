"""The report of `doctor --gpu`: doctor.json for programs and doctor.md for people, rewritten after every check."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from async_flowrl.doctor.findings import STATUSES, Finding
from async_flowrl.doctor.setting import Setting

PRETENDED_DEVICE = (
    "Pretended device: CPU kernels behind a device that says it is a GPU. No figure and no verdict of this report says "
    "anything about a GPU; it shows that the checks run."
)
ROW = ("date", "devices", "versions", "findings", "report")
"""Columns of the table in docs/gpu_runs.md."""


@dataclass
class Report:
    """All findings so far, by check, in the order of the checks; `seconds` is the duration of each check."""

    command: str
    started: str
    """Date and time in UTC."""
    setting: Setting
    checks: dict[str, list[Finding]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        return [finding for findings in self.checks.values() for finding in findings]

    def counts(self) -> str:
        """Returns the number of findings by status, e.g. `12 ok, 1 warning, 0 failed, 2 skipped`."""
        counted = Counter(finding.status for finding in self.findings)
        return ", ".join(f"{counted[status]} {status}" for status in STATUSES)

    def as_json(self) -> dict[str, Any]:
        setting = self.setting
        return {
            "command": self.command,
            "started": self.started,
            "pretended": setting.pretended,
            "quick": setting.quick,
            "devices": setting.devices,
            "device_name": setting.device_name,
            "sizes": asdict(setting.sizes),
            "checks": {
                name: {"seconds": self.seconds[name], "findings": [asdict(finding) for finding in findings]}
                for name, findings in self.checks.items()
            },
        }

    def markdown(self) -> str:
        """Returns a section per check; all figures are only in doctor.json."""
        setting = self.setting
        sections = [
            f"# {setting.devices} × {setting.device_name}",
            f"`{self.command}`, {self.started}: {self.counts()}",
        ]
        if setting.pretended:
            sections.append(f"**{PRETENDED_DEVICE}**")
        if setting.small:
            sections.append("Small sizes: everything runs, no figure is worth comparing.")
        for name, findings in self.checks.items():
            sections += [f"## {name} ({self.seconds[name]:.0f} s)", "\n".join(map(_item, findings))]
        if not setting.pretended and not setting.small:
            sections += ["## Row for docs/gpu_runs.md", f"    {row(self)}"]
        return "\n\n".join(sections) + "\n"

    def write(self, folder: Path) -> None:
        (folder / "doctor.json").write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        (folder / "doctor.md").write_text(self.markdown(), encoding="utf-8")


def row(report: Report) -> str:
    """Returns this report as a row of the table in docs/gpu_runs.md."""
    setting = report.setting
    cells = (
        report.started[:10],
        f"{setting.devices} × {setting.device_name}",
        _versions(report.checks),
        report.counts(),
        "doctor.json",
    )
    return "| " + " | ".join(cells) + " |"


def _versions(checks: Mapping[str, Sequence[Finding]]) -> str:
    numbers = next((f.figures for f in checks.get("machine", ()) if f.name == "versions"), {})
    wanted = {"torch": "torch", "NCCL of torch": "NCCL", "driver": "driver"}
    return ", ".join(f"{short} {numbers[name]}" for name, short in wanted.items() if name in numbers)


def _item(finding: Finding) -> str:
    advice = f" *{finding.advice}*" if finding.advice else ""
    return f"- **{finding.status}** {finding.name}: {finding.sentence}.{advice}"
