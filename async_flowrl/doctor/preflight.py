"""The doctor's checks of a configuration before a run starts (`preflight=true`)."""

from async_flowrl.config.check import ConfigError
from async_flowrl.doctor.findings import FAILED, WARNING
from async_flowrl.doctor.start import start_findings
from async_flowrl.run.prepare import Prepared


def preflight(prepared: Prepared) -> list[str]:
    """Returns the warnings. Raises ConfigError with all failed findings if the run cannot start here."""
    findings = list(start_findings(prepared))
    if broken := [finding for finding in findings if finding.status == FAILED]:
        lines = "\n".join(f"  {finding.line()}" for finding in broken)
        raise ConfigError(f"preflight: {len(broken)} of {len(findings)} checks failed, so nothing was started\n{lines}")
    return [f"preflight: {finding.line()}" for finding in findings if finding.status == WARNING]
