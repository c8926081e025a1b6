"""First row of `check-model`: the network's inputs for a prompt, as a family (a Policy) makes them and as
diffusers' own ("stock") pipeline does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_flowrl.check_model.rows import Gap, Row, Tolerance, gap
from async_flowrl.check_model.stock import Inputs, Stock, network_name, watched, watched_encoding
from async_flowrl.policies.base import Policy
from async_flowrl.types import Sampling

_NOT_ABOUT_TEXT = ("self", "device", "dtype", "num_images_per_prompt", "do_classifier_free_guidance", "lora_scale")
"""Arguments of `encode_prompt` that do not concern the text."""
STEP = "prompt embeddings"
"""Name of the row."""


@dataclass(frozen=True)
class Branches:
    """Both branches of classifier-free guidance: the network's text inputs for the prompt and for the negative prompt.

    `negative` is None without guidance. `calls` has the arguments of each call of the pipeline's `encode_prompt` that
    the family made.
    """

    positive: Mapping[str, Tensor]
    negative: Mapping[str, Tensor] | None
    calls: list[Inputs]


def encode(policy: Policy, pipeline: Any, prompt: str, sampling: Sampling, device: torch.device) -> Branches:
    """Encodes the prompt, and with guidance the negative prompt, by the family's own code."""
    with watched_encoding(pipeline) as calls:
        encoded = policy.encode([prompt])
        if sampling.true_cfg_scale > 1:
            encoded += policy.encode([sampling.negative_prompt], negative=True)
    branches = [{name: torch.as_tensor(value).to(device) for name, value in each.items()} for each in encoded]
    return Branches(branches[0], branches[1] if len(branches) > 1 else None, list(calls))


def compare_embeddings(policy: Policy, branches: Branches, stock: Stock, unguided: Sampling, allowed: Tolerance) -> Row:
    """Compares the tensors that the network gets for prompt and negative prompt, except latents and noise level.

    Raises ValueError if the family does not call its network.
    """
    worst, faults = Gap(0.0, 0.0), []
    for suffix, branch in (("", branches.positive), (" of the negative prompt", branches.negative)):
        ours = {} if branch is None else network_inputs(policy, branch, stock, unguided)
        names = {*ours, *(name for call in stock.network for name in call)} if branch is not None else set()
        for name in sorted(name for name in names if network_name(name) == "other"):
            compared = compare_input(ours.get(name), [call.get(name) for call in stock.network])
            if isinstance(compared, str):
                faults.append((float("inf"), f"{name}{suffix}: {compared}"))
            elif compared.relative > allowed.relative:
                faults.append((compared.difference, f"{name}{suffix} differs by {compared.difference:.2g}"))
            if isinstance(compared, Gap) and compared.difference > worst.difference:
                worst = compared
    if not faults:
        return Row(STEP, True, worst.difference, worst.relative)
    reason = f"{max(faults)[1]}; {_explained(branches.calls, stock.encoded)}"
    measured = worst.difference > 0
    return Row(STEP, False, worst.difference if measured else None, worst.relative if measured else None, reason)


def network_inputs(policy: Policy, branch: Mapping[str, Tensor], stock: Stock, unguided: Sampling) -> Inputs:
    """Returns the arguments of the network's first call when the family computes the velocity of one image.

    Without guidance, the prompt is not padded to the length of the negative one. Raises ValueError if `velocity`
    does not call `policy.transformer`.
    """
    x = stock.before[0][:1]
    with watched(policy.transformer) as calls:
        policy.velocity(x, stock.sigmas[:1].to(x.device), branch, None, unguided)
    if not calls:
        raise ValueError("velocity() does not call policy.transformer, the only network that is trained")
    return calls[0]


def compare_input(ours: Any, theirs: Sequence[Any]) -> Gap | str:
    """Returns the smallest difference of an argument from the rows of the stock pipeline's, or why it has none.

    None can be compared if no row has the shape of `ours`, or if only one side gives the argument to the network. Only
    tensors are compared. A tensor of ones that only one side gives equals none: a mask that masks nothing.
    """
    mine, others = list(_tensors(ours)), [tensor for value in theirs for tensor in _tensors(value)]
    if not mine or not others:
        given = [tensor for tensor in (*mine, *others) if not bool((tensor == 1).all())]
        if not given:
            return Gap(0.0, 0.0)
        shape = list(given[0].shape)
        return f"only the {'family' if mine else 'stock pipeline'} gives it to the network, {shape}"
    pairs = [pair for other in others for pair in _pairs(mine[0], other)]
    if not pairs:
        return f"the family gives {list(mine[0].shape)}, the stock pipeline {list(others[0].shape)}"
    return min((gap(one, other) for one, other in pairs), key=lambda each: each.difference)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach().float() if not value.is_complex() else torch.view_as_real(value.detach())
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _pairs(ours: Tensor, theirs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The two tensors if their shapes are equal; our first row with each of theirs if only their number differs."""
    if ours.shape == theirs.shape:
        yield ours, theirs
    elif ours.dim() == theirs.dim() > 0 and ours.shape[1:] == theirs.shape[1:]:
        for row in theirs:
            yield ours[0], row


def _explained(ours: Sequence[Inputs], theirs: Sequence[Inputs]) -> str:
    """Explains a difference by the arguments of the first `encode_prompt`, or lists usual causes if those agree."""
    if ours and theirs:
        one, other = ours[0], theirs[0]
        names = [
            name for name in other if name not in _NOT_ABOUT_TEXT and "negative" not in name and "embeds" not in name
        ]
        texts = [name for name in names if _plain(one.get(name)) != _plain(other[name]) and not _is_tensor(other[name])]
        if texts:
            said = ", ".join(
                f"{name}={_short(other[name])} where the family has {_short(one.get(name))}" for name in texts
            )
            return f"the stock pipeline calls encode_prompt with {said}"
    return "the stock pipeline may add an instruction or a template, pad to another length, or give the network a mask"


def _plain(value: Any) -> Any:
    """A list of one prompt becomes that prompt."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
