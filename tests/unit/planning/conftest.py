"""Nothing here is made faster by threads."""

from tests.support.threads import one_thread

__all__ = ["one_thread"]
