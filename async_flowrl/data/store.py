"""The prompts of a file as a sequence that creates each Prompt on access, so that a million prompts fit into memory."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import overload

import numpy as np
import numpy.typing as npt

from async_flowrl.config.resolution import Resolution
from async_flowrl.data.prompts import Keys, PromptError, digest, no_target, read_prompt, read_weight, text_key
from async_flowrl.data.rows import Row, Rows
from async_flowrl.types import Prompt

DIGEST_BYTES = 16
MAX_KEPT_REFUSALS = 1000

Indices = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]
TextKeys = npt.NDArray[np.uint64]


@dataclass
class Scan:
    """The result of one pass over a file: a few numbers per prompt, and totals."""

    rows: Rows
    keys: Keys
    # [prompts] Row of each prompt in the file; refused rows are missing.
    places: Indices = field(init=False)
    # [prompts] Hash of each text, and of its images (`text_key`).
    texts: TextKeys = field(init=False)
    # [prompts, 16] `digest` of each prompt.
    digests: npt.NDArray[np.uint8] = field(init=False)
    weights: Weights | None = None
    # True if a prompt has token ids or a system prompt, which not every model can encode.
    special: bool = False
    # Characters of the longest prompt, and its row.
    longest: int = 0
    longest_row: int = 0
    # Column → number of rows that have it.
    columns: Counter[str] = field(default_factory=Counter)
    # Image size set by prompts → row of the first prompt that sets it.
    sizes: dict[Resolution, int] = field(default_factory=dict)
    # Number of prompts that set a size.
    sized: int = 0
    # Number of images → number of prompts that have so many; (height, width) → number of images of that size.
    imaged: Counter[int] = field(default_factory=Counter)
    image_sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    targets: int = 0
    # The first MAX_KEPT_REFUSALS refusals, if the scan keeps them; `refusals` counts all.
    refused: list[PromptError] = field(default_factory=list)
    refusals: int = 0


def scan(rows: Rows, keys: Keys, *, keep_refusals: bool = False, check: Callable[[Prompt], None] | None = None) -> Scan:
    """Reads every row once. Raises PromptError for the first refused row; `keep_refusals` stores refusals instead."""
    places, texts, weights, digests = array("q"), array("Q"), array("d"), bytearray()
    result = Scan(rows, keys)
    for place, row in enumerate(rows.scan()):
        try:
            if isinstance(row, PromptError):
                raise row
            where = rows.where(place)
            result.columns.update(row.keys())
            prompt = read_prompt(len(places), where, row, keys, folder=rows.folder)
            weight = read_weight(where, row, keys.weight) if keys.weight else None
            if check is not None:
                check(prompt)
        except ValueError as error:
            refusal = error if isinstance(error, PromptError) else PromptError(f"{rows.where(place)}: {error}")
            if not keep_refusals:
                raise refusal from error
            result.refusals += 1
            if len(result.refused) < MAX_KEPT_REFUSALS:
                result.refused.append(refusal)
            continue
        places.append(place)
        texts.append(text_key(prompt))
        digests += digest(prompt, weight)
        if weight is not None:
            weights.append(weight)
        _note(result, prompt, place)
    result.places, result.texts = np.frombuffer(places, np.int64), np.frombuffer(texts, np.uint64)
    result.digests = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
    result.weights = np.frombuffer(weights, np.float64) if keys.weight else None
    return result


def _note(scanned: Scan, prompt: Prompt, place: int) -> None:
    if len(prompt.text) > scanned.longest:
        scanned.longest, scanned.longest_row = len(prompt.text), place
    scanned.targets += prompt.target is not None
    if prompt.resolution is not None:
        scanned.sizes.setdefault(prompt.resolution, place)
        scanned.sized += 1
    scanned.imaged[len(prompt.images)] += 1
    scanned.image_sizes.update(image.size for image in prompt.images)
    scanned.special = scanned.special or bool(prompt.system or prompt.token_ids or prompt.negative_token_ids)


class Prompts(Sequence[Prompt]):
    """The prompts of a file, or some of them, in file order; `Prompt.index` is the index in this sequence.

    A Prompt is made when it is read, so that a million prompts fit into memory.
    """

    def __init__(self, source: Scan, chosen: npt.NDArray[np.bool_] | None = None) -> None:
        """`chosen` [prompts] is True for the prompts of the scan to include; None includes all."""
        pick = slice(None) if chosen is None else chosen
        self.rows, self._keys, self._places = source.rows, source.keys, source.places[pick]
        self.texts: TextKeys = source.texts[pick]
        self.weights: Weights | None = None if source.weights is None else source.weights[pick]
        self._digests = source.digests[pick]
        # Of the contents of all prompts and of their order.
        self.digest = _digest_of_all(self._digests.tobytes())
        self.special = source.special
        # Image size set by prompts of the file → place of the first prompt that sets it.
        self.sizes = {size: source.rows.where(place) for size, place in source.sizes.items()}
        self.all_sized = source.sized == len(source.places)
        self.most_images = max(source.imaged, default=0)
        self._cached = lru_cache(maxsize=1024)(self._read)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._cached(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._cached(index % len(self))

    def __iter__(self) -> Iterator[Prompt]:
        places = iter(self._places.tolist())
        next_place, index = next(places, None), 0
        for place, row in enumerate(self.rows.scan()):
            if place == next_place:
                yield self._checked(index, row)
                next_place, index = next(places, None), index + 1
                if next_place is None:
                    return

    @property
    def duplicates(self) -> int:
        return len(self) - len(np.unique(self.texts))

    def check_targets(self) -> None:
        for index, prompt in enumerate(self):
            if not prompt.target:
                raise PromptError(f"{self.where(index)}: {no_target(prompt.text)}")

    def check_each(self, check: Callable[[Prompt], object], most: int | None = None) -> None:
        """Raises PromptError, with its place, for the first of `most` prompts that `check` refuses by a ValueError."""
        for prompt in islice(self, most):
            try:
                check(prompt)
            except ValueError as error:
                raise PromptError(f"{self.where(prompt.index)}: {error}") from error

    def where(self, index: int) -> str:
        return self.rows.where(int(self._places[index]))

    def _read(self, index: int) -> Prompt:
        try:
            row: Row | PromptError = self.rows.row(int(self._places[index]))
        except PromptError as refusal:
            row = refusal
        return self._checked(index, row)

    def _checked(self, index: int, row: Row | PromptError) -> Prompt:
        where, prompt = self.where(index), None
        weight = None if self.weights is None else float(self.weights[index])
        if not isinstance(row, PromptError):
            with suppress(PromptError):
                prompt = read_prompt(index, where, row, self._keys, folder=self.rows.folder)
        if prompt is None or digest(prompt, weight) != self._digests[index].tobytes():
            raise PromptError(f"{where}: this prompt has changed since the start; restore the file, and resume the run")
        return prompt


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Returns the digest of the contents of all prompts and of their order, for any sequence of prompts."""
    return prompts.digest if isinstance(prompts, Prompts) else _digest_of_all(b"".join(map(digest, prompts)))


def _digest_of_all(digests: bytes) -> str:
    return hashlib.blake2b(digests, digest_size=16).hexdigest()


def shared_texts(prompts: Sequence[Prompt], others: Sequence[Prompt]) -> int:
    """Returns the number of `prompts` whose text also occurs among `others`."""
    return int(np.isin(_texts(prompts), _texts(others)).sum())


def _texts(prompts: Sequence[Prompt]) -> TextKeys:
    if isinstance(prompts, Prompts):
        return prompts.texts
    return np.array([text_key(prompt) for prompt in prompts], np.uint64)
