"""First step of the comparison: the network's inputs for a prompt, by the family and by diffusers' "stock" pipeline."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_flowrl.check_model.rows import Gap, Row, Tolerance, gap
from async_flowrl.check_model.stock import Inputs, Stock, network_name, watched, watched_encoding
from async_flowrl.policies.base import Policy
from async_flowrl.types import Sampling

_NO_MATTER = ("self", "device", "dtype", "num_images_per_prompt", "do_classifier_free_guidance", "lora_scale")
"""Arguments of `encode_prompt` that do not concern the text."""
STEP = "prompt embeddings"


@dataclass(frozen=True)
class Branches:
    """Conditioning (the network's text inputs) of the prompt and of the negative prompt, on the device.

    `negative` is None without classifier-free guidance. `calls` are the arguments of the family's calls of
    `encode_prompt`.
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
    """Compares all inputs of the network for both prompts, except the latents and the noise level."""
    worst, faults = Gap(0.0, 0.0), []
    for which, branch in (("", branches.positive), (" of the negative prompt", branches.negative)):
        ours = {} if branch is None else network_inputs(policy, branch, stock, unguided)
        names = {*ours, *(name for call in stock.network for name in call)} if branch is not None else set()
        for name in sorted(name for name in names if network_name(name) == "other"):
            compared = compare_input(ours.get(name), [call.get(name) for call in stock.network])
            if isinstance(compared, str):
                faults.append((float("inf"), f"{name}{which}: {compared}"))
            elif compared.relative > allowed.relative:
                faults.append((compared.difference, f"{name}{which} differs by {compared.difference:.2g}"))
            if isinstance(compared, Gap) and compared.difference > worst.difference:
                worst = compared
    if not faults:
        return Row(STEP, True, worst.difference, worst.relative)
    said = f"{max(faults)[1]}; {_encoding(branches.calls, stock.encoded)}"
    measured = worst.difference > 0
    return Row(STEP, False, worst.difference if measured else None, worst.relative if measured else None, said)


def network_inputs(policy: Policy, branch: Mapping[str, Tensor], stock: Stock, unguided: Sampling) -> Inputs:
    """Returns the arguments of the network's first call when the family computes the velocity of one image.

    There is no guidance, so no prompt is padded to the other's length. Raises ValueError if `velocity` does not call
    `policy.transformer`.
    """
    x = stock.before[0][:1]
    with watched(policy.transformer) as calls:
        policy.velocity(x, stock.sigmas[:1].to(x.device), branch, None, unguided)
    if not calls:
        raise ValueError("velocity() does not call policy.transformer, the only network that is trained")
    return calls[0]


def compare_input(ours: Any, theirs: Sequence[Any]) -> Gap | str:
    """Returns the smallest difference from any row of the stock inputs, or a sentence if none can be compared.

    That is the case if no row has the shape of `ours`, or if only one side passes the argument. A mask of ones equals
    no mask.
    """
    mine, others = list(_tensors(ours)), [tensor for value in theirs for tensor in _tensors(value)]
    if not mine or not others:
        fed = [tensor for tensor in (*mine, *others) if not bool((tensor == 1).all())]
        if not fed:
            return Gap(0.0, 0.0)
        shape = list(fed[0].shape)
        return f"only the {'family' if mine else 'stock pipeline'} feeds it, {shape}"
    pairs = [pair for other in others for pair in _pairs(mine[0], other)]
    if not pairs:
        return f"the family feeds {list(mine[0].shape)}, the stock pipeline {list(others[0].shape)}"
    return min((gap(one, other) for one, other in pairs), key=lambda each: each.difference)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach().float() if not value.is_complex() else torch.view_as_real(value.detach())
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _pairs(ours: Tensor, theirs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if ours.shape == theirs.shape:
        yield ours, theirs
    elif ours.dim() == theirs.dim() > 0 and ours.shape[1:] == theirs.shape[1:]:
        for row in theirs:
            yield ours[0], row


def _encoding(ours: Sequence[Inputs], theirs: Sequence[Inputs]) -> str:
    """Explains a difference by the arguments of `encode_prompt`, or lists usual causes if those agree."""
    if ours and theirs:
        one, other = ours[0], theirs[0]
        names = [name for name in other if name not in _NO_MATTER and "negative" not in name and "embeds" not in name]
        texts = [name for name in names if _plain(one.get(name)) != _plain(other[name]) and not _is_tensor(other[name])]
        if texts:
            said = ", ".join(
                f"{name}={_short(other[name])} where the family has {_short(one.get(name))}" for name in texts
            )
            return f"the stock pipeline calls encode_prompt with {said}"
    return "the stock pipeline may add an instruction or a template, pad to another length, or pass a mask on"


def _plain(value: Any) -> Any:
    """A list of one prompt becomes that prompt."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
