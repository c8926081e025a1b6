"""vllm-omni's networks behind the signatures of the diffusers ones, so that a family's policy runs on either."""

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, cast

import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor, nn

from async_flowrl.rollout.vllm_omni.settings import FAMILIES


def build_network(family: str, od_config: Any) -> nn.Module:
    """vllm-omni's network of `family` in the sizes of the model's own configuration, without weights."""
    from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

    kind = resolve_name(FAMILIES[family])
    given = get_transformer_config_kwargs(od_config.tf_model_config, kind)
    own = {"od_config": od_config, "quant_config": od_config.quantization_config}
    known = kind.__init__.__code__.co_varnames[: kind.__init__.__code__.co_argcount]
    network = kind(**given | {name: value for name, value in own.items() if name in known})
    if not hasattr(network, "stacked_params_mapping"):
        # Where the LoRA manager looks for packed projections; most networks set it while they load, FLUX.1's does not.
        packed: Mapping[str, Sequence[str]] = getattr(network, "packed_modules_mapping", {})
        network.stacked_params_mapping = [
            (f".{whole}", f".{part}") for whole, parts in packed.items() for part in parts
        ]
    return cast("nn.Module", network)


def as_in_diffusers(family: str, network: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """`network` as the policy of `family` calls it, with the diffusers network's `config`."""
    return _VIEWS.get(family, _View)(network, config)


class _View(nn.Module):
    """Takes and gives what the two networks have in common (FLUX.1)."""

    def __init__(self, network: Any, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.network = network
        self.config = FrozenDict(config)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.network(*inputs, **named)


class _QwenImage(_View):
    def forward(self, *, encoder_hidden_states: Tensor, **named: Any) -> Any:
        """Its rotary embedding wants each row's padded text length named."""
        rows, length = encoder_hidden_states.shape[:2]
        return self.network(encoder_hidden_states=encoder_hidden_states, txt_seq_lens=[length] * rows, **named)


class _SD3(_View):
    def forward(self, *, return_dict: bool, **named: Any) -> tuple[Tensor]:
        """It answers with diffusers' output class, whatever is asked for."""
        return (self.network(**named).sample,)


class _ZImage(_View):
    def forward(self, x: Sequence[Tensor], t: Tensor, texts: Sequence[Tensor], **named: Any) -> tuple[list[Tensor]]:
        """It attends to padding, so rows whose texts have other padded lengths go through it one length after another.

        Padding up to the next multiple of 32 tokens is the model's own, and attended to by diffusers as well.
        """
        made: dict[int, Tensor] = {}
        lengths = [-(-len(text) // 32) for text in texts]
        for length in sorted(set(lengths)):
            rows = [row for row, own in enumerate(lengths) if own == length]
            picked = t if len(rows) == len(x) else t[torch.tensor(rows, device=t.device)]
            out, _ = self.network([x[row] for row in rows], picked, [texts[row] for row in rows])
            made |= dict(zip(rows, out, strict=True))
        return ([made[row] for row in range(len(x))],)


_VIEWS: dict[str, type[_View]] = {"qwen_image": _QwenImage, "sd3": _SD3, "z_image": _ZImage}
