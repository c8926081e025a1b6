"""Batches of tickets: which training tickets of a step go through the network together. Pure Python.

With `rollout.tickets_per_batch` = N a step's groups are put in the order of their prompts' lengths, so that texts are
padded little, and their tickets are cut into batches of N. Configuration and prompts decide it, never arrival.
"""

from collections.abc import Sequence

from async_flowrl.tickets.table import Ticket, TicketTable
from async_flowrl.types import Prompt


def by_length(prompts: Sequence[Prompt]) -> tuple[int, ...]:
    """Returns the indices of the prompts in ascending order of length; equally long ones keep their order.

    The length of a text is its number of UTF-8 bytes, because the controller has no tokenizer, and that of token ids is
    their number. Texts come before token ids, which cannot be compared with them.
    """
    return tuple(sorted(range(len(prompts)), key=lambda index: _length(prompts[index])))


def _length(prompt: Prompt) -> tuple[bool, int]:
    if isinstance(wording := prompt.wording, str):
        return False, len(wording.encode())
    return True, len(wording)


def batch_of(table: TicketTable, ticket: Ticket, size: int, order: Sequence[int]) -> list[Ticket]:
    """Returns the tickets, of any state, made in one call with the training ticket `ticket`, itself included.

    `order` has the groups of its step in the order in which batches take them. A batch has `size` tickets, the last one
    of a step those that are left.
    """
    per_group = table.shape.tickets_per_group
    index = order.index(ticket.group) * per_group + ticket.slice_index
    start = index - index % size
    end = min(start + size, table.shape.tickets_per_step)
    first, last = start // per_group, -(-end // per_group)
    tickets = [each for group in order[first:last] for each in table.group(ticket.step, group)]
    return tickets[start - first * per_group : end - first * per_group]
