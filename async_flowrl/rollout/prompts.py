"""Prompts' embeddings by what they were made of: each is encoded once, and kept in host memory."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from async_flowrl.policies.base import Policy
from async_flowrl.rollout.text_encoder import Residence
from async_flowrl.types import Asked, Conditioning, Wording

CACHED_PROMPTS = 1024
"""Least recently used out first; a negative prompt is used all the time and so stays."""


class Encoder(Protocol):
    """Makes embeddings, or finds those that were made before."""

    def encode(self, asked: Sequence[Asked]) -> list[Conditioning]:
        """Float32 arrays of each, as the policy's `encode` gives them for that one alone."""
        ...


class PolicyEncoder:
    """The policy's own text encoders, wherever they reside; all that is asked at once is encoded in one visit."""

    def __init__(self, policy: Policy, residence: Residence) -> None:
        self._policy, self._residence = policy, residence

    def encode(self, asked: Sequence[Asked]) -> list[Conditioning]:
        with self._residence.visit():
            return [encode_one(self._policy, each) for each in asked]


def encode_one(policy: Policy, asked: Asked) -> Conditioning:
    """Alone: batch neighbours would change the last bits."""
    text, system, negative = asked
    (encoded,) = policy.encode([text], system=system, negative=negative)
    return encoded


class Prompts:
    """Asks an encoder for what is not in memory, all that one ticket lacks at once."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._known: OrderedDict[Asked, Conditioning] = OrderedDict()

    def embeddings(self, asked: Sequence[Asked]) -> list[Conditioning]:
        """Float32 arrays per prompt, as the policy encodes them; they are the cache's own: nobody may write to them."""
        missing = [key for key in dict.fromkeys(asked) if key not in self._known]
        if missing:
            self._known |= zip(missing, self._encoder.encode(missing), strict=True)
        for key in asked:
            self._known.move_to_end(key)
        found = [self._known[key] for key in asked]
        while len(self._known) > CACHED_PROMPTS:
            self._known.popitem(last=False)
        return found

    def encode_negatives(self, texts: Sequence[Wording]) -> list[Conditioning]:
        """Of negative prompts, for the trainer, which asks once; they are not kept in memory."""
        return self._encoder.encode([(text, None, True) for text in texts])
