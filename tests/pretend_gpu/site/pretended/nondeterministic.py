"""Operators whose CUDA kernels give varying bits and have no deterministic form.

Source: second list of `torch.use_deterministic_algorithms` ("will throw a RuntimeError when mode=True"), torch 2.13,
as the operators that reach the device. NLLLoss is the 2-d one's kernels (aten/src/ATen/native/cuda/NLLLoss2d.cu); the
quantized `resize_` is left out. The backward pass of scaled_dot_product_attention is not in that list: its kernels vary
exactly where deterministic algorithms are off or `warn_only` is set, and device/operators.h looks after it.
"""

from pretended.library import call

ALWAYS = (
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward",
    "max_unpool2d",
    "max_unpool3d",
    "upsample_linear1d_backward",
    "upsample_bilinear2d_backward",
    "_upsample_bilinear2d_aa_backward",
    "upsample_bicubic2d_backward",
    "_upsample_bicubic2d_aa_backward",
    "upsample_trilinear3d_backward",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "nll_loss2d_forward",
    "nll_loss2d_backward",
    "_ctc_loss_backward",
    "_embedding_bag_dense_backward",
    "put_",
    "histc",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
)
MEDIANS = ("median", "nanmedian")
"""By name also `median()` without indices, which is deterministic: the strict side, until something needs it."""
CONDITIONS = {"cumsum": "floating", "bincount": "weights", "scatter_reduce": "product", "scatter_reduce_": "product"}
"""Operators that vary only with floating-point input, with weights, with reduce="prod"."""


def install() -> None:
    for name in (*ALWAYS, *MEDIANS):
        call("varies", f"aten::{name}".encode(), b"")
    for name, condition in CONDITIONS.items():
        call("varies", f"aten::{name}".encode(), condition.encode())
