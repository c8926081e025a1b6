"""vllm-omni's networks with the call signatures of diffusers' networks, so that a policy can use either."""

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, cast

import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor, nn

from async_flowrl.rollout.vllm_omni.settings import FAMILIES


def build_network(family: str, od_config: Any) -> nn.Module:
    """Returns vllm-omni's network of `family`, sized by the model's configuration; its weights are not loaded yet.

    `od_config` is vllm-omni's configuration of the engine.
    """
    from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

    kind = resolve_name(FAMILIES[family])
    given = get_transformer_config_kwargs(od_config.tf_model_config, kind)
    own = {"od_config": od_config, "quant_config": od_config.quantization_config}
    known = kind.__init__.__code__.co_varnames[: kind.__init__.__code__.co_argcount]
    network = kind(**given | {name: value for name, value in own.items() if name in known})
    if not hasattr(network, "stacked_params_mapping"):
        # The LoRA manager reads packed projections from here. Most networks set it while they load; FLUX.1's does not.
        packed: Mapping[str, Sequence[str]] = getattr(network, "packed_modules_mapping", {})
        network.stacked_params_mapping = [
            (f".{whole}", f".{part}") for whole, parts in packed.items() for part in parts
        ]
    return cast("nn.Module", network)


def as_in_diffusers(family: str, network: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Returns `network` with the call signature that the policy of `family` uses; `config` is that of diffusers."""
    return _VIEWS.get(family, _View)(network, config)


class _View(nn.Module):
    """View of a network whose signature is the same in both libraries (FLUX.1)."""

    def __init__(self, network: Any, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.network = network
        self.config = FrozenDict(config)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.network(*inputs, **named)


class _QwenImage(_View):
    def forward(self, *, encoder_hidden_states: Tensor, **named: Any) -> Any:
        """Adds each row's padded text length, which the rotary embedding of vllm-omni's network needs."""
        rows, length = encoder_hidden_states.shape[:2]
        return self.network(encoder_hidden_states=encoder_hidden_states, txt_seq_lens=[length] * rows, **named)


class _SD3(_View):
    def forward(self, *, return_dict: bool, **named: Any) -> tuple[Tensor]:
        """Returns a tuple: vllm-omni's network always returns diffusers' output class."""
        return (self.network(**named).sample,)


class _ZImage(_View):
    def forward(self, x: Sequence[Tensor], t: Tensor, texts: Sequence[Tensor], **named: Any) -> tuple[list[Tensor]]:
        """Runs the network once for each padded text length, because vllm-omni's network attends to padding.

        Padding to the next multiple of 32 tokens belongs to the model, and diffusers attends to it as well.
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
