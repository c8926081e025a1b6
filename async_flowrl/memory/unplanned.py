"""Warning in place of a comparison with the plan, where the planner fails."""

import logging
from collections.abc import Callable

from async_flowrl.config.check import ConfigError

logger = logging.getLogger(__name__)


def or_warning(what: str, compare: Callable[[], list[str]]) -> list[str]:
    """Returns what `compare` returns, which compares `what` (for example "the nodes' memory") with a plan.

    Raises its ConfigError. Any other failure, such as a model that cannot be planned, becomes a warning, because the
    run may still succeed.
    """
    try:
        return compare()
    except ConfigError:
        raise
    except Exception as error:
        logger.info("no plan of %s", what, exc_info=True)
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return [f"{what} was not compared with a plan: {why}"]
