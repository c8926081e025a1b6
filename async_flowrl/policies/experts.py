"""Two networks of one kind, of which each noise level uses one, as one module: the experts of Wan 2.2.

Everything that trains, sends, proves and saves a network has both in one list of names, which begin with the expert's:
`transformer` for high noise levels, `transformer_2` for low ones.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.policies.stored import EXPERTS


class Experts(nn.Module):
    """Calls `transformer` for timesteps from `boundary` on, `transformer_2` below it, as diffusers' WanPipeline."""

    def __init__(self, networks: Mapping[str, nn.Module], boundary: float) -> None:
        """`networks`: those named in EXPERTS; `boundary` in the timesteps of the networks, 0 to 1000."""
        super().__init__()
        for name in EXPERTS:
            self.add_module(name, networks[name])
        self.boundary = boundary

    @property
    def config(self) -> Any:
        return cast("Any", self.transformer).config

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, *, return_dict: bool
    ) -> tuple[Tensor]:
        """Returns the outputs [n, ...]; all inputs have n rows. The host waits for the device to read the timesteps."""
        high, texts = timestep >= self.boundary, {"encoder_hidden_states": encoder_hidden_states}
        rows = {"hidden_states": hidden_states, "timestep": timestep, **texts, "return_dict": return_dict}
        if bool(high.all()):
            return self._called("transformer", rows)
        if not bool(high.any()):
            return self._called("transformer_2", rows)
        places = [mask.nonzero().flatten() for mask in (high, ~high)]
        outputs = [self._called(name, rows, of)[0] for name, of in zip(EXPERTS, places, strict=True)]
        return (torch.cat(outputs).index_select(0, torch.cat(places).argsort()),)

    def _called(self, name: str, rows: Mapping[str, Any], places: Tensor | None = None) -> tuple[Tensor]:
        some = {
            key: value if places is None or not isinstance(value, Tensor) else value.index_select(0, places)
            for key, value in rows.items()
        }
        return cast("tuple[Tensor]", self.get_submodule(name)(**some))

    def add_adapter(self, adapter: Any, adapter_name: str) -> None:
        """Attaches a PEFT adapter to layers of both, as `add_adapter` of a diffusers network; names are full ones."""
        from peft import inject_adapter_in_model

        inject_adapter_in_model(adapter, self, adapter_name)

    def set_attention_backend(self, name: str) -> None:
        for network in self.children():
            cast("Any", network).set_attention_backend(name)
