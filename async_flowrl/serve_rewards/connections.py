"""The HTTP connections of a reward server: idle ones are closed, so that they do not use up the connection limit."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

ASK_SECONDS = 20.0
"""Seconds without a new request after which a connection is closed.

uvicorn itself would wait for a connection's first request without limit.
"""


class Connection(H11Protocol):
    """A uvicorn connection that is closed if the headers of its next request do not arrive in time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look_again(None)

    def _look_again(self, seen: Any) -> None:
        asyncio.get_running_loop().call_later(ASK_SECONDS, self._look, seen)

    def _look(self, seen: Any) -> None:
        """Closes the connection if no request is running and none has begun since the last look.

        `seen` is the last request at the time of that look, or None.
        """
        if self.transport.is_closing():
            return
        if self.cycle is seen and (seen is None or seen.response_complete):
            self.transport.close()
            return
        self._look_again(self.cycle)
