"""The sum of gradients where FSDP2 adds up the ranks' parts: exact over the parts of a rank, not over the ranks.

A reduce-scatter adds the gradients of the parts that the ranks compute side by side, as floats, in an order that the
number of ranks fixes. Which parts these are is a function of their group (`RankPosition.by_group`), and such sums are
added as integers (see exact.py). So no order of arrival changes a bit of the total; another number of ranks does.
"""

from async_flowrl.training.exact import Account, ExactSum, magnitude
from async_flowrl.training.fsdp import World


class ShardSum(ExactSum):
    """As ExactSum, of this rank's share [numel] of the gradient; only the account is added up over the ranks."""

    def witness(self, largest: float) -> None:
        """Enters a sum to which this rank's part did not contribute; `largest` is what `add` returned, and finite."""
        account = self._account
        self._account = Account(account.count, account.marks, account.magnitude + magnitude(largest))

    def reduce(self, world: World) -> Account:
        """Returns the account of all ranks, equal on every rank; the values are the ranks' total already."""
        return self._reduce_account(world)
