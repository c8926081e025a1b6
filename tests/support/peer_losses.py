"""`python -m tests.support.peer_losses FOLDER` writes peer_losses.json: Flow-Factory's losses and their gradients.

FOLDER is a checkout of X-GenGroup/Flow-Factory at COMMIT. Its `optimize` methods run unchanged, on a stub of their
adapter with a tiny network. A package of theirs that is not installed and does not matter here is stubbed.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch, draw
from tests.support.json_rows import json_rows
from tests.unit.algorithms.algorithm_cases import Network, build, final_rows, nudged

COMMIT = "a0b2bc5a2b4fbf9125429b3fb70c0c5d7631047c"
EXPECTED = Path(__file__).with_suffix(".json")
IMAGES, LEVELS = 4, 3
ADVANTAGES = [1.4, -0.7, 0.3, -6.0]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{
        f"awm {weight}": ("awm", {"error_weight": weight, "clip_range": 1.0, "adv_clip_max": 1.0}, {"weighting": peer})
        for weight, peer in {
            "uniform": "Uniform",
            "sigma": "t",
            "sigma_squared": "t**2",
            "huber": "huber",
            "ghuber": "ghuber",
        }.items()
    },
    "awm clipped": (
        "awm",
        {"error_weight": "ghuber", "clip_range": 0.01, "kl_coef": 0.3, "average_decay": "quick", "average_coef": 0.7},
        {"weighting": "ghuber"},
    ),
    "dgpo": ("dgpo", {"beta": 100.0, "kl_coef": 0.02}, {}),
    "dgpo clipped": ("dgpo", {"beta": 10.0, "clip_range": 0.05, "average_decay": "quick"}, {"clip_dsm": True}),
    "dgpo average": (
        "dgpo",
        {"beta": 20.0, "clip_range": 0.01, "average_decay": "quick", "anchor": "average", "kl_coef": 0.1},
        {"clip_dsm": True, "use_ema_ref": True},
    ),
    "crd": ("crd", {"average_decay": "rising", "anchor": "average", "kl_coef": 0.1}, {"use_old_for_loss": True}),
    "crd reference": ("crd", {"beta": 0.5, "kl_coef": 0.2, "adv_clip_max": 2.0}, {}),
}
"""Name → algorithm, our settings, and those settings of the peer that have other names."""


def inputs() -> tuple[MicroBatch, dict[str, Network]]:
    current = Network(3, seed=1)
    others = {"proximal": 0.02, "reference": 0.2, "average": 0.05}
    networks = {name: nudged(current, size, seed=seed) for seed, (name, size) in enumerate(others.items(), start=4)}
    return final_rows(IMAGES, LEVELS, ADVANTAGES), {"current": current, **networks}


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stubs every package that is not installed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the stub has every attribute."""


class Adapter:
    """A tiny network under the names of several sets of weights."""

    def __init__(self, networks: dict[str, Network]) -> None:
        self.networks, self.active, self.trainable_components = networks, "current", []

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        before, self.active = self.active, name
        yield
        self.active = before

    def use_ref_parameters(self) -> Any:
        return self.use("reference")

    def use_ema_parameters(self) -> Any:
        return self.use("average")

    def use_named_parameters(self, name: str) -> Any:
        return self.use("average")

    def rollout(self) -> None:
        """Nothing changes."""

    train = rollout

    def forward(self, t: Tensor, latents: Tensor) -> Any:
        return SimpleNamespace(noise_pred=self.networks[self.active](latents, t / 1000))


def trained(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[list[float], list[list[float]]]:
    """Returns the peer's loss at each level, and the sums over the levels of the gradients of both parameters."""
    batch, networks = inputs()
    algorithm: Any = build(name=name, **ours)
    noise, _ = draw(batch, algorithm.seeds(batch))
    by_level = [range(level, IMAGES * LEVELS, LEVELS) for level in range(LEVELS)]
    noises = [noise[list(rows)] for rows in by_level]
    times = torch.stack([1000 * batch.sigma[list(rows)] for rows in by_level])
    data = {"all_latents": batch.latents[::LEVELS][:, None], "advantage": torch.tensor(ADVANTAGES)}

    module = importlib.import_module(f"flow_factory.trainers.{name}")
    peer = getattr(module, f"{name.upper()}Trainer")
    trainer: Any = object.__new__(type(peer.__name__, (peer,), {"show_progress_bar": False}))
    losses: list[float] = []

    def backward(loss: Tensor) -> None:
        losses.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]

    config = algorithm.config
    clip, bound = config.clip_range, config.adv_clip_max
    trainer.training_args = Arguments(
        per_device_batch_size=IMAGES, num_inner_epochs=1, seed=0, group_size=IMAGES,
        clip_range=(-clip, clip), adv_clip_range=(-bound, bound),
    )  # fmt: skip
    trainer.accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, sync_gradients=False, backward=backward,
        accumulate=lambda *_: nullcontext(), gather=lambda values: values,
    )  # fmt: skip
    trainer.adapter = Adapter(networks)
    trainer.autocast, trainer.epoch, trainer.step = nullcontext, 0, 0
    trainer.num_train_timesteps, trainer.kl_beta = LEVELS, config.kl_coef
    trainer._sample_timesteps = lambda batch_size, generator=None: times[:, :batch_size]
    settings: dict[str, dict[str, Any]] = {
        "awm": {"ema_kl_beta": config.average_coef, "ghuber_power": 0.25,
                "sampling_context": lambda: trainer.adapter.use("proximal")},
        "dgpo": {"dpo_beta": config.beta, "use_shared_noise": True, "clip_dsm": False, "clip_kl": False,
                 "use_ema_ref": False, "kl_cfg": 1.0, "_make_shared_noise": drawn(noises, 1)},
        "crd": {"crd_beta": config.beta, "crd_loss_type": "mse", "weight_temp": -1.0, "adaptive_logp": True,
                "use_old_for_loss": False, "kl_cfg": 1.0, "reward_adaptive_kl": True},
    }  # fmt: skip
    for key, value in {**settings[name], **theirs}.items():
        setattr(trainer, key, value)
    if name == "dgpo":
        trainer._requires_ema_ref = trainer.clip_dsm or trainer.use_ema_ref
    vars(module)["randn_tensor"] = drawn(noises, 1)
    vars(module)["BaseSample"] = SimpleNamespace(stack=lambda samples: dict(data))
    sample = SimpleNamespace(unique_id=1)
    sample.to = lambda device: sample
    trainer.optimize([sample] * IMAGES)
    return losses, [parameter.grad.tolist() for parameter in networks["current"].parameters()]  # type: ignore[union-attr]


REWARDS = {
    "one": [[300.0, -250.0, 40.0, 10.0], [0.0, 100.0, 100.0, 0.0], [5.0, 5.0, 5.0, 5.0]],
    "other": [[10.0, 30.0, -80.0, 60.0], [200.0, -200.0, 0.0, 50.0], [70.0, 0.0, 0.0, 20.0]],
}
"""Name → raw rewards of three groups, so far apart that the small number that we add to a std does not count."""
WEIGHTS = {"one": 1.0, "other": 0.5}


def gdpo() -> list[float]:
    """Returns the peer's advantages with `advantage_aggregation: gdpo`, of all groups one after the other."""
    module: Any = importlib.import_module("flow_factory.advantage.advantage_processor")
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, process_index=0, reduce=lambda v, reduction: v
    )
    processor = module.AdvantageProcessor(accelerator, WEIGHTS, IMAGES, sampler_type="group_contiguous", verbose=False)
    samples = [SimpleNamespace(unique_id=group) for group in range(3) for _ in range(IMAGES)]
    rewards = {name: torch.tensor(values, dtype=torch.float64).flatten() for name, values in REWARDS.items()}
    advantages: list[float] = processor.compute_gdpo(samples, rewards, store_to_samples=False).tolist()
    return advantages


def drawn(noises: Sequence[Tensor], times: int) -> Any:
    values = iter([noise for noise in noises for _ in range(times)])
    return lambda *_, **__: next(values)


class Arguments(SimpleNamespace):
    """Settings that can be read as attributes and unpacked as keywords."""

    def keys(self) -> Any:
        return vars(self).keys()

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]


def main(folder: str) -> None:
    for package in ("diffusers", "transformers", "peft"):
        importlib.import_module(package)
    sys.meta_path.append(Absent())
    sys.path.insert(0, str(Path(folder) / "src"))
    results = {case: trained(*settings) for case, settings in CASES.items()}
    EXPECTED.write_text(json_rows({"commit": COMMIT, "cases": results, "gdpo": gdpo()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
