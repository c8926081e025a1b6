"""The measurement of an optimizer step's KL after the step, when the device is free.

Without `algorithm.max_kl_per_update` nothing depends on the KL. So a process that samples and trains
(`placement=shared`) need not wait for the ticket under way at the end of the step: it measures the step later, as a
unit of work of its own. No memory is kept for the weights: those before the step stay in the memory of the sum until
the next sum is added up, and those after it are the trained weights until the next step. Only while float32 parameters
are measured there is one more copy of them. The rows that are measured stay on every rank until the next sum, also on
those that measure nothing: the latents and the conditioning of a part of one group.
"""

from torch import Tensor

from async_flowrl.training.messages import Measured
from async_flowrl.training.trust_region import ProbeRows, TrustRegion
from async_flowrl.training.update_metrics import UpdateMetrics


class LaterKL:
    """The measurement of the last optimizer step, if it was put off and not made yet."""

    def __init__(self, region: TrustRegion) -> None:
        self._region = region
        self.wanted = False
        """True: the measurement of the optimizer step under way is put off until after the step."""
        self._owed: tuple[ProbeRows, Tensor] | None = None
        """The rows to measure, and the flat weights before the step."""

    @property
    def owed(self) -> bool:
        """True if there is a step to measure."""
        return self._owed is not None

    def begin(self, *, wanted: bool) -> None:
        """Begins the end of an optimizer step. The last step can no longer be measured: its memory gets the next sum.

        `wanted` has the meaning of the attribute.
        """
        self.wanted, self._owed = wanted, None

    def owe(self, before: Tensor) -> None:
        """Records that the step from the flat weights `before` was taken; `before` must not change until `begin`."""
        self._owed = self._region.rows, before

    def measure(self) -> Measured:
        """Measures the last optimizer step. Raises RuntimeError if there is none to measure."""
        if self._owed is None:
            raise RuntimeError("no optimizer step is left whose KL is to be measured")
        (rows, before), self._owed = self._owed, None
        measured = UpdateMetrics()
        with measured.span("probe"):
            metrics = self._region.measure_after(rows, before)
        return Measured(metrics, tuple(measured.spans))
