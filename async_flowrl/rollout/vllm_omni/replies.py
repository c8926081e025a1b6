"""What comes back from the engine, checked: a failed remote call of vllm-omni is an ordinary reply."""

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class VllmOmniError(RuntimeError):
    """vllm-omni refused a call, failed in it, or answered what was not asked."""


def reply(method: str, results: Any, kind: type[T]) -> T:
    """The one worker's answer out of `collective_rpc`'s nested lists; VllmOmniError unless it is of `kind`."""
    found = results
    while isinstance(found, list | tuple):
        if len(found) != 1:
            raise VllmOmniError(f"vllm-omni answered {method} {len(found)} times, expected once: {found!r:.300}")
        (found,) = found
    if isinstance(found, Mapping) and (found.get("supported") is False or found.get("todo") or "error" in found):
        raise VllmOmniError(f"vllm-omni failed in {method}: {found.get('error') or found.get('reason') or dict(found)}")
    if not isinstance(found, kind):
        raise VllmOmniError(f"vllm-omni answered {method} with {type(found).__name__}, expected {kind.__name__}")
    return found


def metadata(output: Any, group: str) -> Mapping[str, Any]:
    """What our pipeline put beside the images of a finished request; VllmOmniError where the request failed."""
    if output is None:
        raise VllmOmniError("vllm-omni ended a request without an answer")
    if getattr(output, "error", None):
        raise VllmOmniError(f"vllm-omni failed in a request: {output.error}")
    found = ((getattr(output, "multimodal_output", None) or {}).get("metadata") or {}).get(group)
    if not isinstance(found, Mapping):
        raise VllmOmniError(f"vllm-omni answered a request without our pipeline's {group!r}")
    return found
