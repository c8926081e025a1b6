"""Tests of the driver's watch over Ray's head: an error names a head that stays silent."""

import asyncio

import pytest

from separation.head_watchdog import HeadLost, watch_address


def test_a_head_that_is_gone_for_long_enough_is_named() -> None:
    async def scenario() -> tuple[str, bool, float]:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        watch = asyncio.create_task(watch_address("127.0.0.1", port, 0.4))
        await asyncio.sleep(1.0)
        survived = not watch.done()
        server.close()
        await server.wait_closed()
        gone = asyncio.get_running_loop().time()
        with pytest.raises(HeadLost) as lost:
            await asyncio.wait_for(watch, 30)
        return str(lost.value), survived, asyncio.get_running_loop().time() - gone

    sentence, survived, after = asyncio.run(scenario())
    assert survived and after >= 0.2
    assert "was out of reach for 0.4 s" in sentence and "resume=auto" in sentence
