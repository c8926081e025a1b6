"""Memory of the shapes that operators return on the meta device.

On that device an operator computes only the shapes, strides and dtypes of its results. PyTorch does this for most
operators in Python, in up to a millisecond each, and a network calls the same operators with the same shapes in each of
its blocks. `RememberedShapes` lets each of them compute once in a process.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = (Tensor, nn.Parameter)
HASHED = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that are remembered by their value."""


class _Unknown(Exception):
    """Operator whose results may depend on more than is remembered, or are more than new tensors."""


_shapes: dict[Any, Any] = {}
"""Operator and arguments in words (`_key`) → shape, stride and dtype of the result, or a tuple of these."""
_new: dict[Any, bool] = {}
"""Operator → whether its results are always new tensors, and none of its arguments is written to."""


class RememberedShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which operators on the meta device compute the shapes of their results once for equal arguments.

    Later calls in this process return empty tensors of these shapes. Views, operators that write to an argument, and
    tensors on other devices are left alone. Modes that are entered inside this one see every operator.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        try:
            key = _key(func, args, kwargs, tensors)
        except _Unknown:
            return func(*args, **kwargs)
        if key in _shapes:
            return _made(_shapes[key])
        out = func(*args, **kwargs)
        if _shares_storage(out, tensors):
            _new[func] = False
            return out
        with suppress(_Unknown):
            _shapes[key] = _described(out)
        return out


def _key(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """Returns all that the shapes of the results depend on, and appends the tensors among the arguments to `tensors`.

    Raises _Unknown if it is not known what they depend on.
    """
    if not _makes_new_tensors(func):
        raise _Unknown
    given = _worded(args, tensors), tuple(kwargs), _worded(kwargs.values(), tensors)
    if not tensors:
        raise _Unknown  # The device may be any.
    return func, torch.get_default_dtype(), given


def _makes_new_tensors(func: Any) -> bool:
    if func not in _new:
        schema = func._schema
        aliased = any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
        _new[func] = not aliased and torch.Tag.nondeterministic_seeded not in func.tags
    return _new[func]


def _shares_storage(out: Any, tensors: list[Tensor]) -> bool:
    """Whether a result lies in the memory of an argument, as that of `_unsafe_view`, whose schema does not say so."""
    given = {each.untyped_storage()._cdata for each in tensors}
    results = [each for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, Tensor)]
    return any(each.untyped_storage()._cdata in given for each in results)


def _worded(values: Any, tensors: list[Tensor]) -> tuple[Any, ...]:
    """Returns the arguments in words and appends their tensors. Equal numbers of two types are not the same."""
    words: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            if not value.is_meta or value.is_conj() or value.is_neg():
                raise _Unknown
            tensors.append(value)
            words.append((value.shape, value.stride(), value.dtype, value.storage_offset()))
        elif kind in (list, tuple):
            words.append((kind, _worded(value, tensors)))
        elif kind in HASHED:
            words.append((kind, value))
        else:
            raise _Unknown
    return tuple(words)


def _described(out: Any) -> Any:
    """Returns the shapes of an operator's results. Raises _Unknown if they are more than new tensors on meta."""
    if isinstance(out, tuple):
        owners = [each.untyped_storage()._cdata for each in out if type(each) is Tensor]
        if len(set(owners)) < len(owners):
            raise _Unknown
        return tuple(_described(each) for each in out)
    if out is None:
        return None
    if type(out) is not Tensor or not out.is_meta:
        raise _Unknown
    described = tuple(out.shape), out.stride(), out.dtype
    if out.storage_offset() or _made([described]).untyped_storage().nbytes() != out.untyped_storage().nbytes():
        raise _Unknown
    return [described]


def _made(described: Any) -> Any:
    """Returns new tensors of these shapes."""
    if isinstance(described, tuple):
        return tuple(map(_made, described))
    if described is None:
        return None
    ((shape, stride, dtype),) = described
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
