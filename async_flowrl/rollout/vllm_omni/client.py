"""AsyncOmni inside this process: its event loop on a thread of its own, called from ordinary threads."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from async_flowrl.rollout.vllm_omni.replies import VllmOmniError, reply

T = TypeVar("T")


class Client:
    """Starts the engine on construction. All methods block and may be called from any thread."""

    def __init__(self, arguments: Mapping[str, Any], *, start_timeout: float, timeout: float) -> None:
        """Seconds that the start, and afterwards one request or remote call, may take before VllmOmniError."""
        self._timeout = timeout
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-omni", daemon=True)
        self._thread.start()
        try:
            self._omni = self._await(_start(dict(arguments)), start_timeout)
        except BaseException:
            self._stop_loop()
            raise

    def generate(self, prompt: str, parameters: Any, request_id: str) -> Any:
        """The finished output of one request. Raises what the engine raises."""
        return self._await(self._generate({"prompt": prompt}, parameters, request_id), self._timeout)

    def call(self, method: str, kind: type[T], *args: Any) -> T:
        """Runs a method of the worker extension on every rank, between two requests; rank 0's answer.

        Raises VllmOmniError for a failure on any rank and for an answer that is not of `kind`.
        """
        results = self._await(self._omni.collective_rpc(method, timeout=self._timeout, args=args), self._timeout)
        return reply(method, results, kind)

    def close(self) -> None:
        self._omni.shutdown()
        self._stop_loop()

    async def _generate(self, prompt: dict[str, str], parameters: Any, request_id: str) -> Any:
        outputs = self._omni.generate(prompt, sampling_params=parameters, request_id=request_id)
        found = [output async for output in outputs]
        return found[-1] if found else None

    def _await(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)
        except TimeoutError as error:
            raise VllmOmniError(f"vllm-omni did not answer within {timeout:g} s") from error

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _start(arguments: dict[str, Any]) -> Any:
    from vllm_omni import AsyncOmni

    return AsyncOmni(**arguments)
