"""A wrong SANA family: it encodes the prompt alone, without the instruction that diffusers' pipeline puts before it.

The instruction is a default argument of the pipeline's `__call__`, which is easy to miss.
"""

from async_flowrl.policies.sana import SanaFamily, SanaPolicy
from async_flowrl.types import Conditioning


class BarePolicy(SanaPolicy):
    def _encode_one(self, text: str) -> Conditioning:
        return self._read(text, None)


class BareFamily(SanaFamily):
    policy = BarePolicy
