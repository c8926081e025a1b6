"""Linear layers whose frozen weights are stored in 8 or 4 bits (`model.quantize`), for every device and family.

Stored are plain tensors: codes as int8, and scales in the dtype of the network. A layer computes with their product,
which is made at each use, also in the backward pass, and never kept.
"""

import math
import re
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

# Numbers that share a scale where codes have 4 bits; of a layer with fewer inputs or an odd number, a divisor of it.
GROUP = 64
# The layers of a stack of blocks are quantised; embeddings, final layers and what else stands alone are not.
_IN_A_BLOCK = re.compile(r"\.\d+\.")


class Format(Protocol):
    """A way of storing the weights [out, in] of a layer as codes and scales."""

    per_byte: int  # Codes in one byte.

    def group(self, columns: int) -> int:
        """Returns how many numbers of a row share a scale."""

    def encode(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns (codes int8 [out, in / per_byte], scales [out, in / group] in `dtype`) of float32 weights.

        Scales are rounded to `dtype` before codes are chosen. On a CPU equal weights give equal bits everywhere.
        """

    def table(self, dtype: torch.dtype) -> Tensor:
        """Returns what `decode` looks codes up in; it may be empty."""

    def decode(self, codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
        """Returns the weights [out, in] in the dtype of `scale`."""


class EightBits:
    """One scale for each row, so that its largest number becomes `largest` (torchao's weight-only int8 and float8)."""

    per_byte = 1

    def __init__(self, stored: torch.dtype, largest: float) -> None:
        self._stored, self._largest = stored, largest

    def group(self, columns: int) -> int:
        return columns

    def encode(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scale = _nonzero(weight.abs().amax(dim=1, keepdim=True) / self._largest).to(dtype)
        scaled = (weight / scale.float()).clamp(-self._largest, self._largest)
        codes = scaled if self._stored.is_floating_point else scaled.round()
        return codes.to(self._stored).view(torch.int8), scale

    def table(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype)

    def decode(self, codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
        return codes.view(self._stored).to(scale.dtype).mul_(scale)


class FourBits:
    """Two codes in a byte, the first in its upper half, that number 16 `values` from -1 to at most 1.

    `signed`: a scale has the sign with which the largest number of its group becomes -1, as in GGUF's Q4_0.
    """

    per_byte = 2

    def __init__(self, values: tuple[float, ...], *, signed: bool) -> None:
        self._values, self._signed = values, signed

    def group(self, columns: int) -> int:
        return math.gcd(columns, GROUP)

    def encode(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows, columns = weight.shape
        grouped = weight.view(rows, -1, self.group(columns))
        scale = grouped.abs().amax(dim=2)
        if self._signed:
            scale = torch.where(grouped.amin(dim=2) == -scale, scale, -scale)
        scale = _nonzero(scale).to(dtype)
        values = torch.tensor(self._values, device=weight.device).to(dtype).float()
        halfway = (values[1:] + values[:-1]) / 2
        codes = torch.bucketize(grouped / scale.float()[..., None], halfway, out_int32=True).view(rows, -1, 2)
        return (codes[..., 0] * 16 + codes[..., 1]).to(torch.uint8).view(torch.int8), scale

    def table(self, dtype: torch.dtype) -> Tensor:
        """Returns the two values of each byte [256, 2]."""
        values = torch.tensor(self._values).to(dtype)
        return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)

    def decode(self, codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
        pairs = nn.functional.embedding(codes.view(torch.uint8).int(), table)
        return pairs.view(*scale.shape, -1).mul_(scale[..., None]).flatten(1)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


# NormalFloat4 of QLoRA, arXiv 2305.14314, appendix E.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Value of `model.quantize` → how it stores weights.
FORMATS: dict[str, Format] = {
    "int8": EightBits(torch.int8, 127.0),
    "fp8": EightBits(torch.float8_e4m3fn, 448.0),
    "int4": FourBits(tuple(level / 8 for level in range(-8, 8)), signed=True),
    "nf4": FourBits(_NF4, signed=False),
}


def quantized_bytes(name: str | None, weights: int, itemsize: int) -> int:
    """Returns the bytes of so many weights of large layers with scales of `itemsize` bytes; None: of plain weights."""
    if name is None:
        return weights * itemsize
    form = FORMATS[name]
    return weights // form.per_byte + weights * itemsize // form.group(1 << 12)


class QuantizedLinear(nn.Linear):
    """A linear layer with `weight` (codes) and `scale` in one of FORMATS; codes are int8 in all of them."""

    def __init__(self, plain: nn.Linear, name: str) -> None:
        """Takes sizes, device, dtype and bias of `plain`, not its weights; `name` is a key of FORMATS."""
        nn.Module.__init__(self)
        self.format, self.bias = name, plain.bias
        self.out_features, self.in_features = out, columns = plain.weight.shape
        form, device, dtype = FORMATS[name], plain.weight.device, plain.weight.dtype
        codes = torch.empty(out, columns // form.per_byte, dtype=torch.int8, device=device)
        scale = torch.empty(out, columns // form.group(columns), dtype=dtype, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.register_buffer("table", form.table(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns y [..., out] for x [..., in], in the dtype of x."""
        product: Any = _Product.apply
        return cast("Tensor", product(x, self.weight, self.scale.to(x.dtype), self.bias, self.table, self.format))


class _Product(torch.autograd.Function):
    """As `nn.functional.linear` for weights without gradient; keeps codes for the backward pass instead of weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, table: Tensor, form: str
    ) -> Tensor:
        ctx.save_for_backward(codes, scale, table)
        ctx.form = form
        return nn.functional.linear(x, FORMATS[form].decode(codes, scale, table.to(x.dtype)), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        codes, scale, table = ctx.saved_tensors
        weight = FORMATS[ctx.form].decode(codes, scale, table.to(scale.dtype))
        return gradient @ weight, None, None, None, None, None


def quantizable(network: nn.Module) -> dict[str, nn.Linear]:
    """Returns by name the layers that `model.quantize` stores in fewer bits: the linear layers of blocks."""
    # By type, not by isinstance: a subclass may compute something else.
    named = {name: module for name, module in network.named_modules() if type(module) is nn.Linear}
    return {name: layer for name, layer in named.items() if _IN_A_BLOCK.search(name) and layer.in_features % 16 == 0}


@torch.no_grad()
def quantize(network: nn.Module, name: str | None) -> None:
    """Replaces the `quantizable` layers; with None, nothing. On the meta device the new ones are there, too."""
    for place, plain in quantizable(network).items() if name is not None else ():
        layer = QuantizedLinear(plain, str(name))
        if not plain.weight.is_meta:
            codes, scale = FORMATS[layer.format].encode(plain.weight.float(), plain.weight.dtype)
            layer.weight.data, layer.scale.data = codes, scale
        network.set_submodule(place, layer)
