"""The doctor's look at a configuration, taken by a run before it starts (`preflight=true`)."""

from async_flowrl.config.check import ConfigError
from async_flowrl.doctor.findings import FAILED, WARNING
from async_flowrl.doctor.start import start_findings
from async_flowrl.run.prepare import Prepared


def preflight(prepared: Prepared) -> list[str]:
    """Sentences to warn with. Raises ConfigError with every finding that says that the run cannot start here."""
    findings = list(start_findings(prepared))
    if broken := [finding for finding in findings if finding.status == FAILED]:
        lines = "\n".join(f"  {finding.line()}" for finding in broken)
        raise ConfigError(f"preflight: {len(broken)} of {len(findings)} checks failed, so nothing was started\n{lines}")
    return [f"preflight: {finding.line()}" for finding in findings if finding.status == WARNING]
