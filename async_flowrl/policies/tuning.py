"""The trained part of a transformer: a LoRA, or with `tune=full` its own parameters; `tuning_of` hides which."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from async_flowrl.config.schema import FULL, Config, LoraConfig
from async_flowrl.policies import lora, lora_file
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import ResolvedModel
from async_flowrl.policies.stored import trained_names
from async_flowrl.policies.trained_file import save_whole
from checkpoint_engine import LoraModule, binding_probe, tensor_probe


class LoraTuning:
    """Trains a LoRA on a frozen base; it holds only settings, never tensors. `alpha` is sent with every version."""

    whole = False  # Whether the transformer's own weights are trained.

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self.alpha: float | None = config.alpha
        self.rank: int | None = config.rank

    def attach(self, policy: PipelinePolicy, seed: int) -> None:
        """Makes only trained tensors require gradients; call it before torch.compile and FSDP. Raises as `check`."""
        lora.add_lora(policy.transformer, self._config, policy, seed)

    def check(self, policy: PipelinePolicy) -> None:
        """Raises ValueError for names that the network lacks (`lora.targets`, `full.freeze`), and an unfit `lora.path`.

        The network, on the meta device, is then no longer the base.
        """
        if self._config.path is None:
            lora.targeted_modules(policy.transformer, self._config, policy)
            return
        lora.attach_lora(policy.transformer, self._config, policy)
        self.warm_start(policy)

    def warm_start(self, policy: PipelinePolicy) -> None:
        """Loads the LoRA of `lora.path`, if it is set; otherwise does nothing."""
        if self._config.path is not None:
            lora.load_warm_start(policy.transformer, self._config, policy)

    def parameters(self, transformer: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the trained tensors by layout name, sorted; torch.compile does not change the names."""
        return lora.lora_parameters(transformer)

    def dtypes(self, transformer: nn.Module) -> dict[str, torch.dtype]:
        """Returns by layout name the dtype in which the network uses a tensor; versions are sent in it, too."""
        return lora.compute_dtypes(transformer)

    def keep_compute_copies(self, transformer: nn.Module) -> None:
        """Casts the trained tensors to `dtypes`; for rollout workers, whose tensors no optimizer updates."""
        lora.keep_compute_copies(transformer)

    def probe(self, transformer: nn.Module) -> dict[str, Tensor]:
        """Returns the probe of the network's present tensors, with which `checkpoint_engine` proves their version."""
        layers = lora.lora_layers(lora.lora_modules(transformer))
        return binding_probe({name: LoraModule(*parts) for name, parts in layers.items()})

    def save(self, folder: Path, tensors: Mapping[str, Tensor], model: ResolvedModel, path: str) -> Path:
        """Saves trained `tensors`, by layout name, for diffusers (a LoRA for PEFT, too); returns the path to load."""
        return lora_file.save(folder, tensors, alpha=self._config.alpha, base=None if model.random else path)


class FullTuning:
    """Trains all parameters of the transformer, except those that `freeze` names. Methods are as in LoraTuning."""

    whole = True

    def __init__(self, freeze: Sequence[str]) -> None:
        self._freeze = tuple(freeze)
        self.alpha: float | None = None
        self.rank: int | None = None

    def attach(self, policy: PipelinePolicy, seed: int) -> None:
        policy.transformer.requires_grad_(False)
        for parameter in self.parameters(policy.transformer).values():
            parameter.requires_grad_(True)

    def check(self, policy: PipelinePolicy) -> None:
        self.parameters(policy.transformer)

    def warm_start(self, policy: PipelinePolicy) -> None:
        """Does nothing: the run starts with the weights of `model.path`."""

    def parameters(self, transformer: nn.Module) -> dict[str, nn.Parameter]:
        named = {lora.plain_name(name): parameter for name, parameter in transformer.named_parameters()}
        return {name: named[name] for name in trained_names(named, self._freeze)}

    def dtypes(self, transformer: nn.Module) -> dict[str, torch.dtype]:
        return {name: parameter.dtype for name, parameter in self.parameters(transformer).items()}

    def keep_compute_copies(self, transformer: nn.Module) -> None:
        """Does nothing: the loaded parameters already have the dtype in which the network computes."""

    def probe(self, transformer: nn.Module) -> dict[str, Tensor]:
        return tensor_probe(self.parameters(transformer))

    def save(self, folder: Path, tensors: Mapping[str, Tensor], model: ResolvedModel, path: str) -> Path:
        return save_whole(folder, tensors, model)


Tuning = LoraTuning | FullTuning


def tuning_of(config: Config) -> Tuning:
    return FullTuning(config.full.freeze) if config.tune == FULL else LoraTuning(config.lora)
