"""Connections of a reward server that ask nothing: closed, so that they do not take the places of those that ask."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

ASK_SECONDS = 20.0
"""A connection on which no request has begun for as long is closed; uvicorn itself waits for the first one for ever."""


class Connection(H11Protocol):
    """uvicorn's, which is closed when its next request, to the end of its headers, does not come in time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look_again(None)

    def _look_again(self, seen: Any) -> None:
        asyncio.get_running_loop().call_later(ASK_SECONDS, self._look, seen)

    def _look(self, seen: Any) -> None:
        """`seen`: the request that was the last one when it was looked before."""
        if self.transport.is_closing():
            return
        if self.cycle is seen and (seen is None or seen.response_complete):
            self.transport.close()
            return
        self._look_again(self.cycle)
