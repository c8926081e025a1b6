"""A cache of prompt embeddings in host memory, so that an engine encodes each prompt once."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from async_flowrl.policies.base import Policy
from async_flowrl.rollout.text_encoder import Residence
from async_flowrl.types import Asked, Conditioning, Wording

CACHED_PROMPTS = 1024
"""Largest number of embeddings in the cache; the least recently used one is removed first."""


class Encoder(Protocol):
    """Returns embeddings: it computes them, or reads them from files."""

    def encode(self, asked: Sequence[Asked]) -> list[Conditioning]:
        """Returns the conditioning of each, with the same bits as if the policy had encoded it alone."""
        ...


class PolicyEncoder:
    """Computes embeddings with the policy's text encoders, which `residence` brings to the device once per call."""

    def __init__(self, policy: Policy, residence: Residence) -> None:
        self._policy, self._residence = policy, residence

    def encode(self, asked: Sequence[Asked]) -> list[Conditioning]:
        with self._residence.visit():
            return [encode_one(self._policy, each) for each in asked]


def encode_one(policy: Policy, asked: Asked) -> Conditioning:
    """Returns the conditioning of one prompt, encoded alone because others in its batch would change the last bits."""
    text, system, negative = asked
    (encoded,) = policy.encode([text], system=system, negative=negative)
    return encoded


class Prompts:
    """The cache. It asks its encoder for all missing embeddings of a ticket in one call."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._known: OrderedDict[Asked, Conditioning] = OrderedDict()

    def embeddings(self, asked: Sequence[Asked]) -> list[Conditioning]:
        """Returns the conditioning of each; the arrays belong to the cache and must not be changed."""
        missing = [key for key in dict.fromkeys(asked) if key not in self._known]
        if missing:
            self._known |= zip(missing, self._encoder.encode(missing), strict=True)
        for key in asked:
            self._known.move_to_end(key)
        known = [self._known[key] for key in asked]
        while len(self._known) > CACHED_PROMPTS:
            self._known.popitem(last=False)
        return known

    def encode_negatives(self, texts: Sequence[Wording]) -> list[Conditioning]:
        """Returns the conditioning of negative prompts for the trainer, without keeping them in the cache."""
        return self._encoder.encode([(text, None, True) for text in texts])
