"""A safe reader of the pickles that flow_grpo's reward servers and clients exchange, and a writer.

It reads only lists, tuples, dicts, texts, bytes, numbers and numpy arrays of these. No class of any library is looked
up: the names that numpy writes into pickles are mapped to functions of this module, which check their arguments.
"""

import io
import math
import pickle
import struct
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

PLAIN_KINDS = "biufSU"
"""Kinds of numpy dtypes whose bytes are plain values: booleans, integers, floats, bytes and text."""

MAX_VALUES = 1_000_000


class PickleRefused(ValueError):
    """Raised for a pickle that is damaged, too large, or holds anything that is not allowed."""


def loads(body: bytes) -> Any:
    """Returns the value as plain Python objects. Raises PickleRefused, one sentence."""
    try:
        return _Plain().of(_Unpickler(body).load())
    except PickleRefused:
        raise
    except Exception as error:  # a damaged pickle may raise whatever it likes
        raise PickleRefused(f"not a pickle of numbers, texts and arrays: {type(error).__name__}: {error}") from error


def dumps(value: Any) -> bytes:
    """Returns a pickle of protocol 4, which old servers can read."""
    return pickle.dumps(value, protocol=4)


class _DType:
    """Replaces numpy.dtype while a pickle is read: type name and byte order."""

    def __init__(self, spec: object, *_: object) -> None:
        if not isinstance(spec, str):
            raise PickleRefused(f"a numpy dtype must be named by a text, got {type(spec).__name__}")
        self.spec = spec
        self.order: Literal["<", ">", "=", "|"] = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[3] is not None or state[4] is not None:
            raise PickleRefused("numpy arrays of records are not read")
        self.order = state[1] if state[1] in ("<", ">", "=", "|") else "="

    def resolve(self) -> "np.dtype[Any]":
        """Returns the numpy dtype. Raises PickleRefused if its elements are not plain values (PLAIN_KINDS)."""
        try:
            dtype: np.dtype[Any] = np.dtype(self.spec).newbyteorder(self.order)
        except (TypeError, ValueError) as error:
            raise PickleRefused(f"{self.spec!r:.40} is no numpy dtype") from error
        if dtype.kind not in PLAIN_KINDS or dtype.subdtype is not None or dtype.itemsize == 0:
            raise PickleRefused(f"numpy arrays of dtype {self.spec!r:.40} are not read")
        return dtype


class _Array:
    """Replaces numpy.ndarray while a pickle is read."""

    def __init__(self, *_: object) -> None:
        self.value: Any = []

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if isinstance(data, list):  # an array of objects: a list of elements, read by the same rules
            _check(_elements(shape) == len(data), "a numpy array has another number of elements than its shape says")
            self.value = list(data)
        else:
            self.value = _from_bytes(data, dtype, shape, "F" if fortran else "C")


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _from_bytes(data: Any, dtype: _DType, shape: Any, order: str = "C") -> Any:
    resolved = dtype.resolve()
    _check(isinstance(data, bytes | bytearray), "a numpy array without bytes")
    _check(_elements(shape) * resolved.itemsize == len(data), "a numpy array has other bytes than its shape says")
    return np.frombuffer(bytes(data), dtype=resolved).reshape(shape, order="F" if order == "F" else "C")


def _scalar(dtype: _DType, data: Any = b"") -> Any:
    return _from_bytes(data, dtype, (1,))[0].item()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Replaces `_codecs.encode`, by which old pickle protocols store bytes as latin1 text."""
    _check(isinstance(text, str) and encoding in ("latin1", "latin-1"), "bytes in another encoding than latin1")
    return text.encode("latin1")


def _bytes(*arguments: Any) -> bytes:
    _check(not arguments, "bytes() with arguments")
    return b""


def _bytearray(data: Any = b"") -> bytes:
    _check(isinstance(data, bytes | bytearray), "bytearray() of something else than bytes")
    return bytes(data)


ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_bytes for core in ("core", "_core")},
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): _bytes,
    ("__builtin__", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytearray,
}
"""(module, name) that a pickle may refer to → the function or class that is used instead."""


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python; the one in C allocates as much memory as a pickle announces before it reads it."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def __init__(self, body: bytes) -> None:
        super().__init__(io.BytesIO(body))
        self._size = len(body)

    def load_bytearray8(self: Any) -> None:
        """Checks the stated length first; the base class would allocate that many bytes."""
        (length,) = struct.unpack("<Q", self.read(8))
        _check(length <= self._size, "the pickle announces more bytes than it has")
        self.append(bytes(self.read(length)))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8

    def load_build(self: Any) -> None:
        """Allows state only for arrays and dtypes; the base class would also change the attributes of functions."""
        _check(isinstance(self.stack[-2], _Array | _DType), "the pickle sets the state of something else than an array")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise PickleRefused(f"the pickle asks for {module[:60]}.{name[:60]}, which is refused")
        return ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise PickleRefused("the pickle refers to something outside itself, which is refused")


class _Plain:
    """Converts what was read to lists, dicts, texts, bytes and numbers, at most MAX_VALUES of them.

    The limit is needed because a small pickle can nest references to the same list into a huge value.
    """

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def of(self, value: Any) -> Any:
        """Returns the value without numpy objects and their replacements. Raises PickleRefused."""
        self._left -= 1
        _check(self._left >= 0, f"the pickle holds more than {MAX_VALUES} values")
        if isinstance(value, _Array):
            value = value.value
        if isinstance(value, np.ndarray):
            self._left -= value.size
            _check(self._left >= 0, f"the pickle holds more than {MAX_VALUES} values")
            return value.tolist()
        if isinstance(value, dict):
            return {self.of(key): self.of(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(entry) for entry in value]
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        raise PickleRefused(f"the pickle holds a {type(value).__name__}, which is not read")


def _elements(shape: Any) -> int:
    """Returns the number of elements of an array of this shape. Raises PickleRefused if it is no valid shape."""
    _check(isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape), "no shape of an array")
    _check(0 not in shape or len(shape) == 1, "an array without elements in several dimensions")
    return math.prod(shape)


def _check(holds: bool, sentence: str) -> None:
    if not holds:
        raise PickleRefused(sentence)
