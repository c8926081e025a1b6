"""`prepare` checks a configuration completely, as far as this is possible without starting a process."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from async_flowrl.algorithms.base import Algorithm, differentiates_reward
from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.check import ConfigError, guidance_refusal, toy_values
from async_flowrl.config.resolution import (
    Resolution,
    at_size,
    configured,
    frames_of,
    height_width,
    in_words,
    pixels,
    with_frames,
)
from async_flowrl.config.schema import Config, RewardConfig
from async_flowrl.data.load import Data, load_data
from async_flowrl.data.sampler import steps_for
from async_flowrl.data.store import Prompts
from async_flowrl.policies.checked import unchecked
from async_flowrl.policies.pipeline import PipelinePolicy, Shapes
from async_flowrl.policies.registry import (
    FAMILIES,
    PromptCheck,
    ResolvedModel,
    check_prompts_of,
    load_family,
    load_policy,
    resolve_model,
    shapes_of,
)
from async_flowrl.policies.stored import boundary_ratio
from async_flowrl.rewards.registry import (
    HELD_OUT,
    check_differentiable,
    check_groups,
    check_held_out,
    check_rewards,
    prompt_check,
    resolve_term,
)
from async_flowrl.rewards.served import term_key
from async_flowrl.rollout.vllm_omni.engine_settings import check_model
from async_flowrl.run.precheck import CheckedConfig
from async_flowrl.tickets.arithmetic import check_batching
from async_flowrl.tickets.request import (
    RequestBuilder,
    evaluation_resolution,
    evaluation_sampling,
    sampling,
    teacher_of,
)
from async_flowrl.types import Prompt, Sampling

SIZES_SHOWN = 4  # Largest number of image sizes that messages list one by one.


# Import path of a worker class → that of another, used in its place by tests and benchmarks, and further arguments.
Workers = Mapping[str, tuple[str, Mapping[str, Any]]]
OUR_OWN: Workers = MappingProxyType({})


@dataclass(frozen=True)
class Prepared:
    config: Config  # The configuration in which `model.dtype` and `total_steps` are resolved (see `prepare`).
    model: ResolvedModel
    algorithm: Algorithm
    requests: RequestBuilder  # Makes the request of each ticket.
    shapes: Shapes  # Shapes of the network's inputs for the largest images.
    data: Data
    # All sizes in pixels that the run's images can have, sorted by their number of pixels.
    sizes: tuple[Resolution, ...]
    cut: int = 0  # Number of training prompts of which the text encoder reads only the beginning.
    # Worker classes of tests and benchmarks in place of the run's own.
    workers: Workers = field(default_factory=lambda: OUR_OWN)

    @property
    def sizes_in_words(self) -> str:
        sizes = [in_words(size) for size in self.sizes]
        if len(sizes) > SIZES_SHOWN:
            return f"{len(sizes):,} sizes from {sizes[0]} to {sizes[-1]} px"
        return f"{', '.join(sizes)} px"

    @property
    def trained_sizes(self) -> tuple[Resolution, ...]:
        possible = sizes_of(self.config, self.data.train)
        return tuple(size for size in self.sizes if size in possible)

    @property
    def at_largest(self) -> Config:
        return at_size(self.config, self.sizes[-1])


def prepare(checked: CheckedConfig, *, whole: bool = False) -> Prepared:
    """Makes the remaining checks and returns the run's parts. Raises ConfigError, with one sentence, for a mistake.

    In the configuration that is returned, `model.dtype` is the dtype in which the run computes instead of `auto`, and
    `epochs` is applied to `total_steps`. `whole` is as for `check_loading`.
    """
    try:
        config: Config = checked
        algorithm = build_algorithm(config)
        check_batching(config)
        if differentiates_reward(algorithm):
            check_differentiable(config.reward)
        needs_target = check_rewards(config.reward)
        check = prompt_check(config.reward, configured(config.rollout))
        data = load_data(config.data, needs_target=needs_target, check=check)
        config = with_limits(config, len(data.train))
        if check_held_out(config):
            data.evaluation.check_targets()
        evaluated = data.evaluation[: config.evaluate.max_prompts]
        check_evaluated(config, data.evaluation)
        check_patience(config)
        model = resolve_model(config.model)
        config = replace(config, model=replace(config.model, dtype=model.dtype))
        if config.rollout.engine == "vllm_omni":
            check_model(config, model)
        for prompts in (data.evaluation, data.train):
            if prompts.special:
                check_prompts_of(model, prompts)
            lengths = PromptCheck(model, targets=needs_target or check is not None or check_held_out(config))
            prompts.check_each(lengths)
        sizes = allowed_sizes(model, config, data)
        most_images = max(data.train.most_images, data.evaluation.most_images)
        frames = max(frames_of(size) or 1 for size in sizes)
        if differentiates_reward(algorithm) and any(frames_of(size) for size in sizes):
            raise ValueError(f"{algorithm.name} takes the gradient of images, and these are videos of {frames} frames")
        check_groups(config, frames, most_images)
        shapes = shapes_of(model, sizes[-1], most_images)
        baseline = baseline_sampling(config, model)
        check_loading(config, model, data, baseline, whole=whole)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    requests = RequestBuilder(config, data.train, evaluated, data.train.weights, baseline=baseline)
    return Prepared(config, model, algorithm, requests, shapes, data, sizes, cut=lengths.cut)


def check_evaluated(config: Config, prompts: Prompts) -> None:
    """Raises PromptError for the first evaluated prompt that a term cannot score at the size of its images."""
    held_out = RewardConfig(terms=config.evaluate.reward.terms)
    checks = [prompt_check(config.reward), prompt_check(held_out, section=HELD_OUT)]

    def check(prompt: Prompt) -> None:
        size = prompt.resolution or evaluation_resolution(config, prompt.index)
        for scorable in filter(None, checks):
            scorable(replace(prompt, resolution=size))

    prompts.check_each(check, config.evaluate.max_prompts)


def sizes_of(config: Config, prompts: Prompts) -> list[Resolution]:
    drawn = () if prompts.all_sized else configured(config.rollout)
    of_prompts = (with_frames(size, config.rollout.frames) for size in prompts.sizes)
    return list(dict.fromkeys([*of_prompts, *drawn]))


def allowed_sizes(model: ResolvedModel, config: Config, data: Data) -> tuple[Resolution, ...]:
    """Returns every size of an image of the run, by pixels. ValueError with the key or prompt of a wrong one."""
    both = (data.train, data.evaluation)
    frames = config.rollout.frames
    where = {with_frames(size, frames): f"{place}: " for prompts in both for size, place in prompts.sizes.items()}
    if not all(prompts.all_sized for prompts in both):
        key = "rollout.resolutions: " if config.rollout.resolutions else ""
        where |= dict.fromkeys(configured(config.rollout), key)
    trained = sizes_of(config, data.train)
    if config.rollout.tickets_per_batch > 1 and len(trained) > 1:  # evaluations are not batched
        raise ValueError(
            f"rollout.tickets_per_batch={config.rollout.tickets_per_batch} puts images of several prompts into one "
            f"batch, which has one size, got {', '.join(map(in_words, trained))} px: set it to 1, or one size"
        )
    for size, place in where.items():
        try:
            shapes_of(model, size)
        except ValueError as error:
            # An error about the model's files has nothing to do with the place where the size is set.
            raise ValueError(f"{place if str(error).startswith(('resolution', 'frames')) else ''}{error}") from error
    return tuple(sorted(where, key=lambda size: (pixels(size), height_width(size))))


def check_patience(config: Config) -> None:
    """Raises ValueError if a term may wait longer for its servers than the run waits for the term's scores."""
    for name, term in (config.reward.terms | config.evaluate.reward.terms).items():
        reward = resolve_term(name, term)
        seconds = term.options.get("deadline", getattr(reward, "deadline", 0.0))
        if hasattr(reward, "wants_server") and seconds > config.deadlines.score:
            raise ValueError(
                f"{term_key(config, name)}.options.deadline={seconds:g} must be at most "
                f"deadlines.score={config.deadlines.score:g}, after which the run gives the group up"
            )


def check_loading(config: Config, model: ResolvedModel, data: Data, baseline: Sampling | None, *, whole: bool) -> None:
    """Raises ValueError for what trainer ranks and rollout workers would refuse of the model when they load it."""
    # Without `whole`, the network, which takes seconds to import, is only built if a setting names something in it;
    # else its guidance is checked, and its schedules are left to the workers.
    samplings = [sampling(config), evaluation_sampling(config), *filter(None, [baseline])]
    family, backend = load_family(model.family), model.attention_backend
    if data.train.most_images and (config.algorithm.reference_cfg_scale or 0.0) > 1 >= config.rollout.true_cfg_scale:
        raise ValueError(
            "algorithm.reference_cfg_scale above 1 needs rollout.true_cfg_scale above 1 for prompts with images, whose "
            "negative prompts the rollouts encode"
        )
    teachers = config.algorithm.teachers
    named = (config.full.freeze, config.in_shares, config.lora.targets, config.lora.path, backend, teachers)
    whole |= any(named) or config.runtime.in_threads or model.family not in FAMILIES
    family.policy.check_marks(negative=config.rollout.negative_prompt)
    scales = {
        "rollout.true_cfg_scale": config.rollout.true_cfg_scale,
        "algorithm.reference_cfg_scale": config.algorithm.reference_cfg_scale,
        "evaluate.baseline_guidance": baseline.true_cfg_scale if baseline else None,
    }
    model.check_distilled(scales)
    if boundary_ratio(model.path, model.revision) is not None:
        whole = True
        check_experts(config)
    if not whole:
        longest = model.max_sequence_length
        bare = family.described(model.path, revision=model.revision, max_sequence_length=longest)
        for how in samplings:
            bare.check(how)
        return
    from async_flowrl.policies.kernels import check_attention, use_attention
    from async_flowrl.policies.tuning import tuning_of
    from async_flowrl.training.rank_model import check_policy
    from async_flowrl.training.sharded import check_shares

    plain = replace(model, attention_backend=None)
    policy = load_policy(plain, dtype=model.dtype, device="cpu", parts="structure")
    if backend is not None:  # Of other machines only the names are known.
        (use_attention if config.runtime.address is None else check_attention)(policy.transformer, backend)
    check_policy(config, policy, sizes_of(config, data.train))
    for how in samplings[1:]:
        policy.check(how)
        for size in sizes_of(config, data.evaluation):
            policy.sigmas(how.num_inference_steps, size)
    tuning = tuning_of(config)
    tuning.check(policy)
    check_teachers(config, policy, data.train if teachers else ())
    if config.in_shares:
        check_shares(policy, tuning.parameters(policy.transformer).values(), config.trainer.num_workers)


def check_experts(config: Config) -> None:
    """Raises ValueError if the ranks that share a base would need other experts of it at the same time."""
    shared = config.trainer.num_workers > 1 and (config.is_sharded or config.layout_is_open)
    if shared and config.algorithm.window_per != "step" and not config.algorithm.global_std:
        instead = "" if config.trainer.cpu_offload else ", or trainer.shard=none"
        raise ValueError(
            f"algorithm.window_per={config.algorithm.window_per} lets groups of one step train different noise levels, "
            "and ranks that share a base (trainer.shard) have to compute with the same expert of it: set "
            f"algorithm.window_per=step{instead}"
        )


def check_teachers(config: Config, policy: PipelinePolicy, prompts: Iterable[Prompt]) -> None:
    """Raises ValueError for a teacher whose LoRA the attached one cannot hold, and for a prompt without a teacher."""
    from async_flowrl.policies.lora import attach_lora, read_teacher

    teachers = config.algorithm.teachers
    if teachers and config.lora.path is None:
        attach_lora(policy.transformer, config.lora, policy)
    for label, path in teachers.items():
        read_teacher(label, path, config.lora, policy)
    for prompt in prompts:
        teacher_of(teachers, prompt)


def with_limits(config: Config, prompts: int) -> Config:
    if config.epochs is None:
        return config
    steps = steps_for(config.epochs, prompts, config.prompts_per_step)
    return replace(config, total_steps=min(config.total_steps, steps))


def doubts_of(prepared: Prepared) -> list[str]:
    """Returns warnings, one sentence each, about settings that are possible but perhaps not intended."""
    config, model, doubts = prepared.config, prepared.model, list[str]()
    if config.epochs is not None:
        steps = steps_for(config.epochs, len(prepared.requests.train), config.prompts_per_step)
        if (last := config.total_steps) < steps:
            doubts.append(f"epochs={config.epochs} would take {steps} steps; total_steps={last} ends the run before")
    if model.random:
        doubts.append("model.weights=random: what is trained is noise; only seconds and memory mean anything")
    never_checked = unchecked(model.family, model.path, model.revision, resolution=prepared.sizes[-1])
    return [*doubts, *filter(None, (never_checked, toy_values(config)))]


def baseline_sampling(config: Config, model: ResolvedModel) -> Sampling | None:
    """Returns the model's usual denoising steps and guidance, or those of `evaluate.baseline_*`.

    Raises ValueError for an `evaluate.baseline_guidance` that the family's networks cannot have.
    """
    if not config.evaluate.baseline:
        return None
    evaluate, sampling = config.evaluate, evaluation_sampling(config)
    embedded = sampling.guidance_scale > 0
    if config.model.path != "tiny":
        true_cfg_scale, guidance_scale = model.usual_guidance
        embedded = guidance_scale > 0
        sampling = replace(
            sampling,
            num_inference_steps=load_family(model.family).usual_steps,
            true_cfg_scale=true_cfg_scale,
            guidance_scale=guidance_scale,
        )
    if evaluate.baseline_steps is not None:
        sampling = replace(sampling, num_inference_steps=evaluate.baseline_steps)
    if evaluate.baseline_guidance is not None:
        scale = evaluate.baseline_guidance
        if refusal := guidance_refusal("evaluate.baseline_guidance", scale, embedded=embedded):
            raise ValueError(refusal)
        sampling = replace(sampling, guidance_scale=scale) if embedded else replace(sampling, true_cfg_scale=scale)
    return sampling
