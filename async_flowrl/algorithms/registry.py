"""The registry of algorithms: builds the configured one and refuses settings that do not fit together.

`run/prepare.py` builds the algorithm before any worker starts; each trainer rank builds it again.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor

from async_flowrl.algorithms.awm import AWM
from async_flowrl.algorithms.base import Algorithm, check_tuples, differentiates_reward
from async_flowrl.algorithms.crd import CRD
from async_flowrl.algorithms.dgpo import DGPO
from async_flowrl.algorithms.diffusion_nft import DiffusionNFT
from async_flowrl.algorithms.direct_align import DirectAlign
from async_flowrl.algorithms.dpo import DPO
from async_flowrl.algorithms.ema import SAMPLED_FROM_AVERAGE
from async_flowrl.algorithms.flow_grpo import DanceGRPO, FlowDPPO, FlowGRPO, GRPOGuard, MixGRPO
from async_flowrl.algorithms.policy_gradient import MIN_GAUSSIAN_STD, PolicyGradient, uses_density
from async_flowrl.algorithms.sde import step_stds, validate_schedule
from async_flowrl.algorithms.vgrpo import VGRPO
from async_flowrl.algorithms.window import FINAL_ALGORITHMS as FINAL
from async_flowrl.algorithms.window import (
    check_levels,
    check_window,
    possible_steps,
    rows_per_image,
    trains_on_final_images,
)
from async_flowrl.config.error_text import as_written, check_options, in_one_line, unknown_name
from async_flowrl.config.own_code import OWN_CODE, import_named
from async_flowrl.config.schema import AlgorithmConfig, Config

BUILT_IN: dict[str, type] = {
    cls.name: cls
    for cls in (
        FlowGRPO,
        DanceGRPO,
        MixGRPO,
        GRPOGuard,
        FlowDPPO,
        DiffusionNFT,
        DPO,
        AWM,
        VGRPO,
        DGPO,
        CRD,
        DirectAlign,
    )
}
MEMBERS = ("name", "records", "needs", "vanishes_at_zero", "group_local", "predicts",
           "reads", "advantages", "select", "predict", "loss")  # fmt: skip
# Names that `needs` may have (base.py says what they are).
PREDICTIONS = ("proximal", "behaviour", "reference", "average", "teacher")


def build_algorithm(run: Config) -> Algorithm:
    """Returns the configured algorithm. The single fields must have passed `config.check`. Raises ValueError."""
    config, max_staleness = run.algorithm, run.max_staleness
    factory = _factory(config.name)
    final = trains_on_final_images(config)
    check_levels(config, run.rollout.num_inference_steps)
    if not final:
        check_window(config, run.rollout.num_inference_steps)
        _check_noise(config)
    _check_combination(config, final=final)
    _check_penalty(config, final=final, updates_per_batch=run.trainer.updates_per_batch)
    correction = "none" if final else resolve_correction(config, max_staleness)
    build = factory if config.name in BUILT_IN else partial(_built, factory)
    algorithm = cast("Algorithm", build(config, correction=correction))
    if isinstance(algorithm, PolicyGradient):
        algorithm.reach = reach_of(run)
    _check_algorithm(algorithm, config, max_staleness=max_staleness, hand_over=run.hand_over)
    _check_averages_teachers_and_reference(algorithm, config)
    _check_steps(algorithm, config, final=final)
    _check_run(algorithm, run)
    return algorithm


def resolve_correction(config: AlgorithmConfig, max_staleness: int) -> str:
    """Returns `algorithm.correction`; if it is null, "none" for max_staleness of at most 1 and "mask" above."""
    return config.correction or ("none" if max_staleness <= 1 else "mask")


def reach_of(run: Config) -> float:
    """Returns KL per denoising step at which `correction=mask` begins by default ÷ KL of one update per image."""
    # Between Gaussians of one std, sqrt(KL) is a distance, so n updates move the policy by at most n² times the KL of
    # one. n counts the optimizer steps between the oldest sample's version and the last step of its batch. A denoising
    # step gets twice its equal share, because the shares differ (in the glyphs example by a factor of 2).
    updates = (run.max_staleness + 1) * run.trainer.updates_per_batch - 1
    return 2.0 * updates**2 / max(1, run.rollout.num_inference_steps - 1)


def check_schedule(config: AlgorithmConfig, sigmas: Tensor, *, max_staleness: int) -> None:
    """Raises ValueError for noise levels `sigmas` [T+1] that the algorithm cannot use."""
    # These are schedules that do not fall from 1 to 0, cps steps with std below MIN_GAUSSIAN_STD if their density is
    # used, and schedules without any step that `algorithm.max_kl_per_update` could measure.
    steps = possible_steps(config, len(sigmas) - 1)
    validate_schedule(sigmas, config.sde_type if steps else "ode")
    correction = resolve_correction(config, max_staleness)
    by_mean = bool(getattr(_factory(config.name), "needs_proximal_mean", False))
    if config.sde_type == "cps" and uses_density(config, correction, by_mean):
        for index in steps:
            std = float(sigmas[index + 1]) * math.sin(config.noise_level * math.pi / 2.0)
            if std < MIN_GAUSSIAN_STD:
                raise ValueError(
                    f"a cps step has std {std:.4f}; KL, teachers, correction, flow_dppo and clip_unit=nats need at "
                    f"least {MIN_GAUSSIAN_STD}: end algorithm.sde_window_range earlier or raise algorithm.noise_level"
                )
    if config.max_kl_per_update is not None:
        widest = float(step_stds(sigmas, sde_type=config.sde_type, noise_level=config.noise_level).max())
        if widest < MIN_GAUSSIAN_STD:
            raise ValueError(
                f"algorithm.max_kl_per_update would bound nothing: the largest std of a step's noise is {widest:.3g}, "
                f"and only steps with at least {MIN_GAUSSIAN_STD} are measured; raise algorithm.noise_level or set "
                "algorithm.max_kl_per_update=null"
            )


def _factory(name: str) -> Any:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ValueError(f"{unknown_name('algorithm.name', name, BUILT_IN)} ({OWN_CODE})")
    return import_named("algorithm.name", name)


def _built(factory: Any, config: AlgorithmConfig, correction: str) -> Any:
    check_options("algorithm.options", factory, config.options, beside=("config", "correction"))
    try:
        return factory(config, correction=correction, **config.options)
    except Exception as error:
        raise ValueError(f"algorithm.name {config.name!r} cannot be built: {in_one_line(error)}") from error


def _check_noise(config: AlgorithmConfig) -> None:
    if config.sde_type == "cps" and config.noise_level > 1.0:
        raise ValueError(f"algorithm.noise_level must be in [0, 1] for cps, got {config.noise_level}")
    if config.sde_type == "ode" or config.noise_level == 0.0:
        values = f"algorithm.sde_type={config.sde_type}, algorithm.noise_level={config.noise_level}"
        raise ValueError(f"{config.name} needs noisy steps, got {values}")


def _check_combination(config: AlgorithmConfig, *, final: bool) -> None:
    if config.name == GRPOGuard.name and config.sde_type != "sde":
        raise ValueError(f"grpo_guard is derived for algorithm.sde_type=sde only, got {config.sde_type}")
    if config.name == DanceGRPO.name and config.sde_type != "dance_sde":
        raise ValueError(f"dance_grpo needs algorithm.sde_type=dance_sde, got {config.sde_type}; or use flow_grpo")
    if config.name == MixGRPO.name and config.window not in ("sliding", "random"):
        raise ValueError(f"mix_grpo needs algorithm.window=sliding or random, got {config.window}; or use flow_grpo")
    if refusal := unused_field(config):
        raise ValueError(refusal)
    if final and config.correction not in (None, "none"):
        no_use = f"{config.name} trains on final images, for which algorithm.correction={config.correction} has no use"
        raise ValueError(f"{no_use}: set algorithm.correction=null")
    if math.isinf(config.adv_clip_max) and (config.name in (DiffusionNFT.name, CRD.name) or config.adv_clip == "tanh"):
        raise ValueError(f"algorithm.adv_clip_max=inf would make every loss of {config.name} infinite: give a number")
    if config.options and config.name in BUILT_IN:
        raise ValueError(f"algorithm.options are for your own algorithms, got {dict(config.options)} for {config.name}")


def _check_penalty(config: AlgorithmConfig, *, final: bool, updates_per_batch: int) -> None:
    if config.kl_coef == 0.0 or (config.kl_form != "proximal" and config.name != VGRPO.name):
        return
    if final and config.kl_form == "proximal":
        raise ValueError(f"{config.name} has no log-probs, so algorithm.kl_form=proximal has no meaning")
    if updates_per_batch == 1:
        first = "which is 0 at the first optimizer step of a batch"
        which = "algorithm.kl_coef of vgrpo" if final else "algorithm.kl_form=proximal"
        raise ValueError(f"{which}, {first}, needs trainer.updates_per_batch of at least 2, got 1")


def _check_steps(algorithm: Algorithm, config: AlgorithmConfig, *, final: bool) -> None:
    """Refuses a trust region that measures nothing, and step weights that have no effect or are applied already."""
    if config.max_kl_per_update is not None:
        if final:
            none = f"{config.name} has none: set algorithm.max_kl_per_update=null"
            raise ValueError(f"algorithm.max_kl_per_update bounds the KL of noisy denoising steps, and {none}")
        if config.kl_probe_images == 0:
            raise ValueError("algorithm.max_kl_per_update needs algorithm.kl_probe_images of at least 1, got 0")
        if not hasattr(algorithm, "moved"):
            raise ValueError(
                f"algorithm.max_kl_per_update needs the KL between two predictions, and {config.name} has no "
                "moved(batch, before, after): write one, or set algorithm.max_kl_per_update=null"
            )
    if config.step_weight != "none" and (final or not getattr(algorithm, "gaussian", True)):
        reason = "has no noisy steps to weigh" if final else "weighs steps by their variance already, under cps"
        raise ValueError(f"{config.name} {reason}: set algorithm.step_weight=none")


def _check_averages_teachers_and_reference(algorithm: Algorithm, config: AlgorithmConfig) -> None:
    """Refuses settings of an average, a teacher or a reference that the loss lacks, or does not compare with."""
    if ("average" in algorithm.needs) != (config.average_decay is not None):
        kind, decay = ("a moving", "null") if config.average_decay is None else ("no", config.average_decay)
        sentence = f"{config.name} compares with {kind} average{_with(config, 'anchor', 'average_coef')}"
        raise ValueError(f"{sentence}, got algorithm.average_decay={decay}")
    if bool(config.teachers) != ("teacher" in algorithm.needs):
        given = f"algorithm.teachers={list(config.teachers)}, algorithm.teacher_coef={config.teacher_coef:g}"
        raise ValueError(f"{config.name} needs both to learn from a teacher, or neither, got {given}")
    if config.policy_coef != 1.0 and not config.teachers:
        raise ValueError(f"algorithm.policy_coef={config.policy_coef:g} has no effect without algorithm.teachers")
    if config.policy_coef == 0.0 and config.zero_std_groups == "drop":
        dropped = "algorithm.zero_std_groups=drop would leave out prompts that the teacher alone teaches"
        raise ValueError(f"{dropped} (algorithm.policy_coef=0): set algorithm.zero_std_groups=count")
    if config.name == DGPO.name and config.average_decay is None and config.clip_range != AlgorithmConfig().clip_range:
        none = f"algorithm.clip_range={config.clip_range:g} has no effect with dgpo without algorithm.average_decay"
        raise ValueError(f"{none}: set that, or leave the clip_range at {AlgorithmConfig().clip_range:g}")
    if config.name == CRD.name and config.reference_cfg_scale is not None and config.anchor == "reference":
        guided = f"algorithm.reference_cfg_scale={config.reference_cfg_scale:g}"
        raise ValueError(
            f"{config.name} would compare images with a reference of other guidance, got algorithm.anchor=reference "
            f"and {guided}: set algorithm.anchor=average, or algorithm.reference_cfg_scale=null"
        )
    for key in ("reference_cfg_scale", "reference_every"):
        if (given := getattr(config, key)) is not None and "reference" not in algorithm.needs:
            sentence = f"{config.name} compares with no reference{_with(config, 'anchor', 'kl_coef', 'kl_form')}"
            raise ValueError(f"{sentence}, got algorithm.{key}={given}")


def _with(config: AlgorithmConfig, *keys: str) -> str:
    """Returns the fields of `keys` that the algorithm uses, as `with algorithm.anchor=reference`."""
    used = [key for key in keys if config.name in (USED_BY.get(key) or ())]
    fields = [f"algorithm.{key}={as_written(getattr(config, key)).removesuffix('.0')}" for key in used]
    return f" with {' and '.join(fields)}" if fields else ""


def _check_run(algorithm: Algorithm, run: Config) -> None:
    optional = [name for name, term in run.reward.terms.items() if not term.required]
    if optional and run.algorithm.combine == "gdpo":
        raise ValueError(
            f"algorithm.combine=gdpo needs all rewards of a group: reward.terms.{optional[0]}.required=true"
        )
    if run.group_size == 1 and not differentiates_reward(algorithm):
        raise ValueError(f"{algorithm.name} compares the images of a group: group_size must be at least 2, got 1")
    if (trained := run.algorithm.train_images_per_group) is not None and trained > run.group_size:
        raise ValueError(f"algorithm.train_images_per_group={trained} is more than group_size={run.group_size}")
    if differentiates_reward(algorithm) and (after := run.data.curriculum.after) is not None:
        alike = f"data.curriculum.after={after} sets prompts aside whose images are alike"
        raise ValueError(f"{algorithm.name} does not compare images, and {alike}: leave it out")
    levels, forward = rows_per_image(run.algorithm, run.rollout.num_inference_steps), run.trainer.timesteps_per_forward
    joins = getattr(algorithm, "joins_levels", False) and run.trainer.updates_per_batch > 1
    if joins and forward not in (None, levels):
        which = f"all {levels} levels of an image from the second optimizer step of a batch on"
        raise ValueError(f"{algorithm.name} joins {which}: set trainer.timesteps_per_forward=null, got {forward}")


def _check_algorithm(algorithm: Algorithm, config: AlgorithmConfig, *, max_staleness: int, hand_over: str) -> None:
    if missing := [member for member in MEMBERS if not hasattr(algorithm, member)]:
        raise ValueError(f"{config.name} is not an algorithm: it lacks {', '.join(missing)}")
    check_tuples(algorithm, ("predicts", "reads", "needs"), config.name)
    if unknown := [name for name in algorithm.needs if name not in PREDICTIONS]:
        raise ValueError(unknown_name(f"`needs` of {config.name}", unknown[0], PREDICTIONS))
    if missing := [key for key in algorithm.reads if key not in algorithm.predicts]:
        keys = ", ".join(algorithm.predicts) or "nothing"
        raise ValueError(f"the loss of {config.name} reads {', '.join(missing)} of a prediction, predict gives {keys}")
    final, records = trains_on_final_images(config), algorithm.records
    if final != (records == "final"):
        must = str(not final).lower()
        raise ValueError(f"{config.name} records {records!r}, so algorithm.final_images must be {must}")
    if hand_over == "stream" and not algorithm.group_local:
        name = "combine=gdpo" if config.combine == "gdpo" else "global_std"
        raise ValueError(f"algorithm.{name} needs hand_over=batch: the batch's std is not known while it streams")
    stale = max_staleness >= 1 and algorithm.records == "transitions" and "behaviour" not in algorithm.needs
    as_shipped = isinstance(algorithm, PolicyGradient) and resolve_correction(config, max_staleness) == "none"
    if stale and config.correction != "none" and config.name not in BUILT_IN and not as_shipped:
        needs = f"max_staleness={max_staleness} needs algorithm.correction=none to be given explicitly"
        raise ValueError(f"{config.name} has no behaviour term, so {needs}")


# Algorithms that train on noisy denoising steps; for the others denoising adds no noise.
NOISY = tuple(name for name in BUILT_IN if name not in FINAL)
# Field of the section → the built-in algorithms that use it; fields that all of them use are left out. A field without
# an effect must keep its default, so that no setting is ignored in silence. An algorithm of your own may use all of
# them.
USED_BY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("sde_type", "noise_level", "window", "sde_window_size", "sde_window_range"),
            *("window_interval", "window_decay", "window_interval_min", "window_decay_start", "window_decay_rate"),
            *("window_list", "clip_unit", "step_weight", "max_kl_per_update", "kl_probe_images"),
            *("kl_form", "correction", "correction_threshold", "tis_cap", "zero_std_groups"),
        ),
        NOISY,
    ),
    **dict.fromkeys(("timestep_range", "timestep_stratified"), FINAL),
    "clip_range": (*NOISY, "awm", "vgrpo", "dgpo"),
    "kl_coef": (*NOISY, "diffusion_nft", "awm", "vgrpo", "dgpo", "crd", "direct_align"),
    **dict.fromkeys(
        ("global_std", "normalise", "combine", "permute_advantages"), tuple(n for n in BUILT_IN if n != "direct_align")
    ),
    "adv_clip_max": (*(name for name in BUILT_IN if name not in ("flow_dppo", "dpo", "direct_align")),),
    "train_images_per_group": tuple(n for n in BUILT_IN if n not in ("dpo", "dgpo", "crd", "direct_align")),
    "adv_clip": ("awm", "vgrpo", "dgpo"),
    "beta": ("diffusion_nft", "dpo", "dgpo", "crd"),
    "advantage_mode": ("diffusion_nft",),
    "old_policy_decay": SAMPLED_FROM_AVERAGE,
    "error_weight": ("awm",),
    "average_decay": ("awm", "dgpo", "crd"),
    "average_coef": ("awm",),
    "anchor": ("dgpo", "crd"),
    **dict.fromkeys(("teachers", "teacher_coef", "policy_coef"), tuple(name for name in BUILT_IN if name != "dpo")),
    "reference_every": tuple(name for name in BUILT_IN if name != "vgrpo"),
    "reference_cfg_scale": ("diffusion_nft", "dpo", "awm", "dgpo", "crd", "direct_align"),
}
# Field → another value than its default that says no more than that it has no effect.
SAYS_NOTHING = {"sde_type": "ode", "correction": "none", "kl_probe_images": 0}


def unused_field(config: AlgorithmConfig) -> str | None:
    """Returns a sentence on the first field that is set and that the algorithm does not use; None if there is none."""
    if config.name not in (*NOISY, *FINAL):
        return None
    for name, default in vars(AlgorithmConfig()).items():
        value, used_by = getattr(config, name), USED_BY.get(name)
        if used_by is None or config.name in used_by or value in (default, SAYS_NOTHING.get(name, default)):
            continue
        use = f"{', '.join(used_by)} {'uses' if len(used_by) == 1 else 'use'} it"
        meant = " (TRL's beta is algorithm.kl_coef here)" if name == "beta" else ""
        return f"algorithm.{name}={as_written(value)} has no effect with {config.name}: leave it out{meant}; {use}"
    return None
