"""SANA as one writes it who has not seen the default of the stock pipeline's `__call__`, an instruction."""

from async_flowrl.policies.sana import SanaFamily, SanaPolicy
from async_flowrl.types import Conditioning


class BarePolicy(SanaPolicy):
    def _encode_one(self, text: str) -> Conditioning:
        return self._read(text, None)


class BareFamily(SanaFamily):
    policy = BarePolicy
