"""The classes of PEFT that this project uses, imported without scipy's large modules.

PEFT imports transformers, which imports scipy.optimize for object detection; diffusers imports scipy.stats and
scipy.integrate for schedules of denoising steps that no run has. That is two thirds of a second of CPU in every worker.
The three are imported when they are used (separation/deferred.py).
"""

from async_flowrl.policies.transformers_names import read_names_once
from separation.deferred import defer

defer("scipy.stats")
defer("scipy.integrate")
defer("scipy.optimize", functions=("linear_sum_assignment",))
read_names_once()

from peft import LoraConfig  # noqa: E402  after what it must not import
from peft.tuners.lora import Linear, LoraLayer  # noqa: E402

__all__ = ["Linear", "LoraConfig", "LoraLayer"]
