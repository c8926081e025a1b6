"""The values that a scale of guidance may have, for every setting and option that is one."""

import math


def guidance_refusal(key: str, scale: float, *, embedded: bool = False) -> str | None:
    """Returns one sentence if the setting or option `key` cannot have the value `scale`; None if it can.

    `embedded`: the model takes the scale as an input of its network. Else the guidance is classifier-free, and a scale
    between 0 and 1 would weaken the prompt; the network is then called without guidance instead.
    """
    if embedded:
        allowed, values = 0 < scale < math.inf, "above 0 for a model that takes guidance as an input"
    else:
        allowed, values = scale == 0 or 1 <= scale < math.inf, "above 1, or 0 or 1 for no guidance"
    return None if allowed else f"{key} must be {values}, got {scale:g}"
