"""Tests of the measurements in benchmarks/ that run in one process, on the tiny model."""

from typing import Any

import pytest

from benchmarks import controller, job_cpu
from tests.unit.benchmarks import image_payload as payload


def test_the_controller_serves_every_ticket() -> None:
    for mode in controller.MODES:
        found = controller.measure(6, *mode)
        assert found.tickets == 6 * (controller.STEPS - controller.WARM_UP_STEPS)
        assert found.cpu_per_ticket > 0
    assert 100 < controller.bytes_per_ticket(100) < 1000


def test_what_wakes_a_worker_is_its_own_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work per ticket at the gate does not grow with the number of workers: nobody is asked for another's sake."""
    from async_flowrl.tickets.table import TicketTable

    asked = 0
    real = TicketTable.next_for

    def counting(self: TicketTable, worker: str, **how: Any) -> Any:
        nonlocal asked
        asked += 1
        return real(self, worker, **how)

    monkeypatch.setattr(TicketTable, "next_for", counting)
    counts = []
    for workers in (10, 80):
        asked = 0
        controller.measure(workers, 0, "batch")
        counts.append(asked / workers)
    assert counts[1] <= 1.2 * counts[0]


def test_the_bare_loop_takes_a_step() -> None:
    assert job_cpu.bare(1, ["group_size=2", "trainer.micro_batch_size=2", "rollout.num_inference_steps=3"]) > 0


def test_bytes_of_a_ticket_in_the_object_store() -> None:
    """Window 2 of 10: no more than three latents per image, the picture, the text once per ticket, and 4 KB."""
    for resolution, images in ((64, 4), (128, 2)):
        found = payload.measure(resolution, images)
        assert found.latent == resolution * resolution
        assert found.stored <= found.allowed
        assert found.allowed == 3 * found.latent + 3 * resolution**2 + 4096 + found.embeddings / images
