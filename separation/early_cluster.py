"""EarlyCluster is a Ray cluster on this machine that starts before its run is prepared, which saves the run a second.

While Ray's daemons get ready, a thread does the caller's own work, e.g. imports. This module does not import Ray.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from separation.group import PoolSpec
from separation.signals import ctrl_c_ignored

if TYPE_CHECKING:
    from separation.ray_connection import RayConnection


class EarlyCluster:
    """A cluster for some pools; `cluster` (cluster.py) takes it over, or `close` ends it.

    What cannot be started is not raised here but in `take`, so that the run reports it as it reports any failure.
    """

    def __init__(self, pools: Sequence[PoolSpec], *, meanwhile: Callable[[], object]) -> None:
        """Starts the cluster and blocks until it is ready and `meanwhile`, called in a thread, has returned.

        `meanwhile` is not called if the daemons could not even be launched. Raises what `meanwhile` raises, and what a
        signal makes the main thread raise, e.g. KeyboardInterrupt; then the cluster has ended and so has the thread,
        for which Ctrl-C is ignored meanwhile.
        """
        self._connection: RayConnection | None = None
        self._error: Exception | None = None
        self._records: list[logging.LogRecord] = []
        work = _Work(meanwhile)
        try:
            try:
                self._connect(pools, work)
            except Exception as error:
                self._error = error
            work.finish()
        except BaseException:
            self.close()
            with ctrl_c_ignored():
                work.wait()
            raise

    def take(self) -> "RayConnection":
        """Returns the connection, which the caller must close. Raises what the start raised, and logs its warnings.

        Raises RuntimeError if the connection was taken or closed before.
        """
        records, self._records = self._records, []
        for record in records:
            logging.getLogger(record.name).handle(record)
        if self._error is not None:
            raise self._error
        if self._connection is None:
            raise RuntimeError("this cluster was taken over already, or has ended")
        connection, self._connection = self._connection, None
        return connection

    def close(self) -> None:
        """Ends the cluster, unless it was taken over; blocks for up to some seconds, in which Ctrl-C is ignored."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with ctrl_c_ignored():
                connection.close()

    def _connect(self, pools: Sequence[PoolSpec], meanwhile: threading.Thread) -> None:
        """Connects, and keeps what is logged meanwhile for `take`, because a run's log is not open yet."""
        from separation.ray_connection import RayConnection

        kept, logger = _Kept(self._records), logging.getLogger("separation")
        propagate, logger.propagate = logger.propagate, False
        logger.addHandler(kept)
        try:
            self._connection = RayConnection(pools, None, meanwhile=meanwhile)
        finally:
            logger.removeHandler(kept)
            logger.propagate = propagate


class _Work(threading.Thread):
    """A call in a thread; it may never be started."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(name="work while the cluster starts")
        self._call = call
        self._failed: BaseException | None = None

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._failed = error

    def wait(self) -> None:
        if self.ident is not None:
            self.join()

    def finish(self) -> None:
        """Waits until the call has returned, and raises what it raised."""
        self.wait()
        if self._failed is not None:
            raise self._failed


class _Kept(logging.Handler):
    """Appends records to a list."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)
