"""The trained part of a transformer, by `tune`: a LoRA attached to it, or its own parameters.

Trainer, rollout, plan and export ask here for names, dtypes and the binding probe of what is trained; nothing else in
them knows which of the two it is.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor, nn

from async_flowrl.config.messages import did_you_mean
from async_flowrl.config.schema import FULL, Config, LoraConfig
from async_flowrl.policies import lora
from async_flowrl.policies.base import Policy
from checkpoint_engine import LoraModule, binding_probe, tensor_probe


class Tuning(Protocol):
    """One of the two; without state of its own."""

    alpha: float | None
    """Scale of a LoRA, which travels with every version; None where there is none."""
    rank: int | None

    def attach(self, policy: Policy, seed: int) -> None:
        """Makes the trained tensors ask for gradients and freezes all others. Before compiling and sharding."""
        ...

    def check(self, policy: Policy) -> None:
        """Raises ValueError for names in the configuration that the network does not have."""
        ...

    def warm_start(self, policy: Policy) -> None:
        """Loads what the run starts from, where that is not the base model."""
        ...

    def parameters(self, transformer: nn.Module) -> dict[str, nn.Parameter]:
        """The trained tensors by layout name, sorted; the same names behind torch.compile."""
        ...

    def dtypes(self, transformer: nn.Module) -> dict[str, torch.dtype]:
        """By layout name, the dtype that the network computes with each in, and in which versions travel."""
        ...

    def keep_compute_copies(self, transformer: nn.Module) -> None:
        """Casts the trained tensors to these dtypes, where no optimizer needs float32 masters."""
        ...

    def probe(self, transformer: nn.Module) -> dict[str, Tensor]:
        """What the network's live tensors are, for the binding proof of `checkpoint_engine`."""
        ...


def tuning_of(config: Config) -> Tuning:
    """As `tune` says."""
    return FullTuning(config.full.freeze) if config.tune == FULL else LoraTuning(config.lora)


class LoraTuning:
    """A LoRA is attached and trained; the base model is frozen."""

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self.alpha: float | None = config.alpha
        self.rank: int | None = config.rank

    def attach(self, policy: Policy, seed: int) -> None:
        lora.add_lora(policy.transformer, self._config, policy, seed)

    def check(self, policy: Policy) -> None:
        lora.targeted_modules(policy.transformer, self._config, policy)

    def warm_start(self, policy: Policy) -> None:
        if self._config.path is not None:
            lora.load_warm_start(policy.transformer, self._config, policy)

    def parameters(self, transformer: nn.Module) -> dict[str, nn.Parameter]:
        return lora.lora_parameters(transformer)

    def dtypes(self, transformer: nn.Module) -> dict[str, torch.dtype]:
        return lora.compute_dtypes(transformer)

    def keep_compute_copies(self, transformer: nn.Module) -> None:
        lora.keep_compute_copies(transformer)

    def probe(self, transformer: nn.Module) -> dict[str, Tensor]:
        layers = lora.lora_layers(lora.lora_modules(transformer))
        return binding_probe({name: LoraModule(*parts) for name, parts in layers.items()})


class FullTuning:
    """All parameters of the transformer are trained, but for those whose names `freeze` matches."""

    def __init__(self, freeze: Sequence[str]) -> None:
        self._freeze = tuple(freeze)
        self.alpha: float | None = None
        self.rank: int | None = None

    def attach(self, policy: Policy, seed: int) -> None:
        """Raises ValueError for a pattern that matches nothing, and for patterns that leave nothing to train."""
        policy.transformer.requires_grad_(False)
        for parameter in self.parameters(policy.transformer).values():
            parameter.requires_grad_(True)

    def check(self, policy: Policy) -> None:
        self.parameters(policy.transformer)

    def warm_start(self, policy: Policy) -> None:
        """Nothing: the run starts at the weights of `model.path`."""

    def parameters(self, transformer: nn.Module) -> dict[str, nn.Parameter]:
        named = {lora.plain_name(name): parameter for name, parameter in transformer.named_parameters()}
        return {name: named[name] for name in trained_names(named, self._freeze)}

    def dtypes(self, transformer: nn.Module) -> dict[str, torch.dtype]:
        return {name: parameter.dtype for name, parameter in self.parameters(transformer).items()}

    def keep_compute_copies(self, transformer: nn.Module) -> None:
        """Nothing: a loaded network's parameters have the dtypes it computes in."""

    def probe(self, transformer: nn.Module) -> dict[str, Tensor]:
        return tensor_probe(self.parameters(transformer))


def trained_names(names: Mapping[str, object], freeze: Sequence[str]) -> list[str]:
    """Names that no pattern of `full.freeze` matches, sorted.

    Patterns are the shell's: * stands for anything, dots included. Raises ValueError, one sentence, for one that
    matches nothing, and where nothing is left.
    """
    frozen: set[str] = set()
    for pattern in freeze:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            hint = did_you_mean(pattern, sorted(names), shown=str)
            raise ValueError(
                f"full.freeze: {pattern!r} matches no parameter of the model, e.g. {min(names)}{hint}; "
                "* stands for anything: 'pos_embed.*'"
            )
        frozen |= matched
    if not names.keys() - frozen:
        raise ValueError(f"full.freeze={list(freeze)} freezes all {len(names)} parameters: nothing is left to train")
    return sorted(names.keys() - frozen)
