"""From `algorithm.name` to a checked algorithm; refuses in one sentence what would not do what it says."""

import importlib
from typing import Any, cast

import torch
from torch import Tensor

from async_flowrl.algorithms.advantage import check_advantage
from async_flowrl.algorithms.base import Algorithm
from async_flowrl.algorithms.diffusion_nft import ADVANTAGE_MODES, DiffusionNFT
from async_flowrl.algorithms.dpo import DPO
from async_flowrl.algorithms.ema import OLD_POLICY_DECAYS
from async_flowrl.algorithms.flow_dppo import FlowDPPO
from async_flowrl.algorithms.flow_grpo import DanceGRPO, FlowGRPO, MixGRPO
from async_flowrl.algorithms.grpo_guard import GRPOGuard
from async_flowrl.algorithms.policy_gradient import check_density, uses_density
from async_flowrl.algorithms.sde import check_noise_level, cps_std, validate_schedule
from async_flowrl.algorithms.window import check_window, possible_steps, trains_on_final_images
from async_flowrl.config.messages import unknown_name
from async_flowrl.config.schema import AlgorithmConfig

BUILT_IN: dict[str, type] = {
    cls.name: cls for cls in (FlowGRPO, DanceGRPO, MixGRPO, GRPOGuard, FlowDPPO, DiffusionNFT, DPO)
}
MEMBERS = ("name", "records", "needs_behaviour", "needs_reference", "vanishes_at_zero", "group_local",
           "advantages", "select", "predict", "loss")  # fmt: skip
CORRECTIONS = ("none", "mask", "tis")


def build_algorithm(
    config: AlgorithmConfig, *, max_staleness: int, updates_per_batch: int, hand_over: str, num_inference_steps: int
) -> Algorithm:
    """The algorithm, checked against its configuration and the run's. ValueError in one sentence otherwise."""
    factory = _factory(config.name)
    own = config.name not in BUILT_IN
    final = trains_on_final_images(config)
    _check_names(config)
    _check_numbers(config)
    check_advantage(config)
    if not final:
        check_window(config, num_inference_steps)
        _check_steps(config)
    elif num_inference_steps < 1:
        raise ValueError(f"rollout.num_inference_steps must be at least 1, got {num_inference_steps}")
    _check_combination(config, final=final)
    _check_penalty(config, final=final, updates_per_batch=updates_per_batch)
    if hand_over == "stream" and updates_per_batch > 1:
        raise ValueError(f"trainer.updates_per_batch must be 1 with hand_over=stream, got {updates_per_batch}")
    correction = "none" if final else resolve_correction(config, max_staleness)
    algorithm = cast("Algorithm", factory(config, correction=correction, **(config.options if own else {})))
    _check_algorithm(algorithm, config, max_staleness=max_staleness, hand_over=hand_over)
    return algorithm


def resolve_correction(config: AlgorithmConfig, max_staleness: int) -> str:
    """`correction`, or where it is not given: none for samples at most one version old, mask above."""
    return config.correction or ("none" if max_staleness <= 1 else "mask")


def check_schedule(config: AlgorithmConfig, sigmas: Tensor, *, max_staleness: int) -> None:
    """ValueError for a schedule [T+1] that the algorithm cannot use.

    Besides the shape of the schedule: cps steps whose std is below 0.05, where their Gaussian density is used.
    """
    steps = possible_steps(config, len(sigmas) - 1)
    validate_schedule(sigmas, config.sde_type if steps else "ode")
    correction = resolve_correction(config, max_staleness)
    if config.sde_type == "cps" and uses_density(config, correction, config.name == FlowDPPO.name):
        for index in steps:
            check_density(torch.tensor(cps_std(float(sigmas[index + 1]), config.noise_level)))


def _factory(name: str) -> Any:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ValueError(unknown_name("algorithm.name", name, BUILT_IN) + " (or pkg.module:attr for one of your own)")
    module_name, attribute = name.split(":", 1)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"algorithm.name {name!r} cannot be imported: {error}") from error
    if not hasattr(module, attribute):
        raise ValueError(
            unknown_name(f"algorithm.name: {module_name}", attribute, [n for n in vars(module) if n[0] != "_"])
        )
    return getattr(module, attribute)


def _check_names(config: AlgorithmConfig) -> None:
    choices = {
        "clip_unit": (config.clip_unit, ("mean", "nats")),
        "kl_form": (config.kl_form, ("code", "exact", "proximal")),
        "advantage_mode": (config.advantage_mode, tuple(ADVANTAGE_MODES)),
        "old_policy_decay": (config.old_policy_decay, tuple(OLD_POLICY_DECAYS)),
        "correction": (config.correction or "none", CORRECTIONS),
    }
    for field, (given, allowed) in choices.items():
        if given not in allowed:
            raise ValueError(unknown_name(f"algorithm.{field}", given, allowed))


def _check_numbers(config: AlgorithmConfig) -> None:
    for field in ("clip_range", "correction_threshold", "tis_cap", "beta"):
        value = getattr(config, field)
        if not 0.0 < value < float("inf"):
            raise ValueError(f"algorithm.{field} must be a positive number, got {value}")
    if not 0.0 <= config.kl_coef < float("inf"):
        raise ValueError(f"algorithm.kl_coef must be a number >= 0, got {config.kl_coef}")


def _check_steps(config: AlgorithmConfig) -> None:
    check_noise_level(config.sde_type, config.noise_level)
    if config.sde_type == "ode" or config.noise_level == 0.0:
        raise ValueError(
            f"{config.name} needs noisy steps, got algorithm.sde_type={config.sde_type}, "
            f"algorithm.noise_level={config.noise_level}"
        )


def _check_combination(config: AlgorithmConfig, *, final: bool) -> None:
    if config.name == GRPOGuard.name and config.sde_type != "sde":
        raise ValueError(f"grpo_guard is derived for algorithm.sde_type=sde only, got {config.sde_type}")
    if config.name == DanceGRPO.name and config.sde_type != "dance_sde":
        raise ValueError(
            f"dance_grpo needs algorithm.sde_type=dance_sde, got {config.sde_type}; use flow_grpo otherwise"
        )
    if config.name == MixGRPO.name and config.window not in ("sliding", "random"):
        raise ValueError(
            f"mix_grpo needs algorithm.window=sliding or random, got {config.window}; use flow_grpo otherwise"
        )
    if final and config.correction not in (None, "none"):
        raise ValueError(
            f"{config.name} trains on final images, so algorithm.correction={config.correction} has no meaning"
        )
    if config.options and config.name in BUILT_IN:
        raise ValueError(
            f"algorithm.options are for algorithms of your own, got {dict(config.options)} for {config.name}"
        )
    if config.old_policy_decay != "copy" and config.name != DiffusionNFT.name:
        raise ValueError(f"algorithm.old_policy_decay={config.old_policy_decay} needs diffusion_nft, got {config.name}")


def _check_penalty(config: AlgorithmConfig, *, final: bool, updates_per_batch: int) -> None:
    if config.kl_form != "proximal" or config.kl_coef == 0.0:
        return
    if final:
        raise ValueError(f"{config.name} has no log-probs, so algorithm.kl_form=proximal has no meaning")
    if updates_per_batch == 1:
        raise ValueError(
            "algorithm.kl_form=proximal is 0 at the first optimizer step of a batch, so it needs "
            "trainer.updates_per_batch of at least 2, got 1"
        )


def _check_algorithm(algorithm: Algorithm, config: AlgorithmConfig, *, max_staleness: int, hand_over: str) -> None:
    missing = [member for member in MEMBERS if not hasattr(algorithm, member)]
    if missing:
        raise ValueError(f"{config.name} is not an algorithm: it lacks {', '.join(missing)}")
    final = trains_on_final_images(config)
    if final != (algorithm.records == "final"):
        raise ValueError(
            f"{config.name} records {algorithm.records!r}, so algorithm.final_images must be {str(not final).lower()}"
        )
    if hand_over == "stream" and not algorithm.group_local:
        raise ValueError(
            "algorithm.global_std needs hand_over=batch: the std of the whole batch is not known while it streams"
        )
    stale = max_staleness >= 1 and algorithm.records == "transitions" and not algorithm.needs_behaviour
    if stale and config.correction != "none" and config.name not in BUILT_IN:
        raise ValueError(
            f"{config.name} has no behaviour term, so max_staleness={max_staleness} needs algorithm.correction=none "
            "to be given explicitly"
        )
