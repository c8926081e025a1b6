"""Planted faults in letting a delivery pass beside the work; as in table.py."""

from tests.mutants.table import TICKETS, one

WORKER = "async_flowrl.rollout.worker:RolloutWorker"
TEST = "tests.unit.rollout.test_deliveries"
ARRIVES = f"{TEST}:test_weights_that_arrive_in_a_denoising_step_cost_no_image_and_change_none"

DELIVERIES = (
    one(
        "a worker makes its ticket again when weights arrive",
        f"{WORKER}.generate",
        "        rollout = self.engine.generate(request)\n",
        "        held = self.receiver.held()\n"
        "        rollout = self.engine.generate(request)\n"
        "        if held != self.receiver.held():\n"
        "            rollout = self.engine.generate(request)\n",
        ARRIVES,
    ),
    one(
        "the weights that arrive go live in the middle of a ticket",
        f"{WORKER}.receive",
        "    return self.receiver.receive(header, buffer, slot=slot)\n",
        "    ack = self.receiver.receive(header, buffer, slot=slot)\n"
        "    self.receiver.activate(header.stream, header.version, slot=slot)\n"
        "    return ack\n",
        ARRIVES,
    ),
    one(
        "tickets under way go again when their worker acknowledges",
        f"{TICKETS}:TicketTable.acknowledge",
        "    held.policy[version] = digest\n",
        "    held.policy[version] = digest\n"
        "    for ticket in self.live():\n"
        "        if ticket.worker == worker and ticket.state is State.RUNNING:\n"
        "            self.retry(ticket)\n",
        f"{TEST}:test_a_run_makes_every_ticket_once_however_many_deliveries_fall_into_it",
        arguments={"k": 1, "hand_over": "batch"},
    ),
)
