"""The values that a scale of classifier-free guidance may have, for every setting and option that is one."""

import math


def guidance_refusal(key: str, scale: float) -> str | None:
    """Returns one sentence if the setting or option `key` cannot have the value `scale`; None if it can.

    A scale between 0 and 1 would weaken the prompt; the networks are then called without guidance instead.
    """
    if scale == 0 or 1 <= scale < math.inf:
        return None
    return f"{key} must be above 1, or 0 or 1 for no guidance, got {scale:g}"


def embedded_guidance_refusal(key: str, scale: float) -> str | None:
    """Returns one sentence if `key` cannot have this value for a model that takes guidance as an input; else None."""
    if 0 < scale < math.inf:
        return None
    return f"{key} must be above 0 for a model that takes guidance as an input, got {scale:g}"
