"""Prompts' embeddings by what they were made of: each is encoded once, and kept in host memory."""

from collections import OrderedDict
from collections.abc import Sequence

from async_flowrl.policies.base import Policy
from async_flowrl.rollout.text_encoder import Residence
from async_flowrl.types import Conditioning, Wording

CACHED_PROMPTS = 1024
"""Least recently used out first; a negative prompt is used all the time and so stays."""

Asked = tuple[Wording, str | None, bool]
"""A prompt's words or token ids, its system prompt, and whether guidance leads away from it."""


class Prompts:
    """Asks the policy's text encoders for what is not cached, all that one ticket lacks in one visit."""

    def __init__(self, policy: Policy, residence: Residence) -> None:
        self._policy, self._residence = policy, residence
        self._known: OrderedDict[Asked, Conditioning] = OrderedDict()

    def embeddings(self, asked: Sequence[Asked]) -> list[Conditioning]:
        """Float32 arrays per prompt, as the policy encodes them; they are the cache's own: nobody may write to them."""
        missing = [key for key in dict.fromkeys(asked) if key not in self._known]
        if missing:
            with self._residence.visit():
                for key in missing:
                    text, system, negative = key
                    (self._known[key],) = self._policy.encode([text], system=system, negative=negative)
        for key in asked:
            self._known.move_to_end(key)
        found = [self._known[key] for key in asked]
        while len(self._known) > CACHED_PROMPTS:
            self._known.popitem(last=False)
        return found

    def encode_negatives(self, texts: Sequence[Wording]) -> list[Conditioning]:
        """Of negative prompts, for the trainer, which asks once; they are not cached."""
        with self._residence.visit():
            return self._policy.encode(texts, negative=True)
