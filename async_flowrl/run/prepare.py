"""Everything a run needs that can be had without starting a process; what is wrong with a configuration shows here."""

from dataclasses import dataclass, replace

from async_flowrl.algorithms.base import Algorithm
from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.check import ConfigError
from async_flowrl.config.resolution import at_size, configured, height_width, in_words, pixels
from async_flowrl.config.schema import FULL, Config
from async_flowrl.data.load import Data, load_data
from async_flowrl.data.sampler import steps_for
from async_flowrl.data.store import Prompts
from async_flowrl.policies import lora_file
from async_flowrl.policies.base import Shapes
from async_flowrl.policies.checked import unchecked
from async_flowrl.policies.registry import ResolvedModel, check_prompts_of, load_policy, resolve_model, shapes_of
from async_flowrl.rewards.held_out import check_held_out, check_held_out_prompts
from async_flowrl.rewards.registry import check_rewards, prompt_check
from async_flowrl.rewards.time_limits import too_slow
from async_flowrl.rollout.vllm_omni.settings import check_model
from async_flowrl.run.baseline import baseline_sampling
from async_flowrl.run.early import refuse_early
from async_flowrl.tickets.arithmetic import check_batching, shape
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.types import Resolution

SIZES_SHOWN = 4


@dataclass(frozen=True)
class Prepared:
    config: Config
    model: ResolvedModel
    algorithm: Algorithm
    requests: RequestBuilder
    shapes: Shapes
    """Of the largest images."""
    data: Data
    sizes: tuple[Resolution, ...]
    """That images can have, in the order of their pixels."""

    @property
    def sizes_in_words(self) -> str:
        """All of them where they are few, otherwise how many there are, and the smallest and largest."""
        sizes = [in_words(size) for size in self.sizes]
        if len(sizes) > SIZES_SHOWN:
            return f"{len(sizes):,} sizes from {sizes[0]} to {sizes[-1]} px"
        return f"{', '.join(sizes)} px"

    @property
    def trained_sizes(self) -> tuple[Resolution, ...]:
        """Those of training images, in the same order."""
        found = sizes_of(self.config, self.data.train)
        return tuple(size for size in self.sizes if size in found)

    @property
    def at_largest(self) -> Config:
        """The configuration with the largest images alone, for what is planned from the configuration."""
        return at_size(self.config, self.sizes[-1])


def prepare(config: Config) -> Prepared:
    """What is refused early, then algorithm, batching, prompts and model, checked in this order. Raises ConfigError.

    In what it returns `model.dtype` is never `auto`: it is what the run computes in, and a resume is compared with it.
    """
    try:
        refuse_early(config)
        algorithm = build_algorithm(config)
        check_batching(config)
        check_tickets_per_batch(config)
        if config.lora.path is not None:
            lora_file.read_for(config.lora)
        needs_target = check_rewards(config.reward)
        data = load_data(config.data, needs_target=needs_target, check=prompt_check(config.reward))
        config = with_limits(config, len(data.train))
        if check_held_out(config):
            data.evaluation.check_targets()
        check_held_out_prompts(config, data.evaluation[: config.evaluate.max_prompts])
        model = resolve_model(config.model)
        config = replace(config, model=replace(config.model, dtype=model.dtype))
        if config.rollout.engine == "vllm_omni":
            check_model(config, model)
        for prompts in (data.train, data.evaluation):
            if prompts.special:
                check_prompts_of(model, prompts)
        sizes = allowed_sizes(model, config, data)
        shapes = shapes_of(model, sizes[-1])
        check_trained(model, config)
    except (ValueError, FileNotFoundError, PermissionError) as error:
        raise ConfigError(str(error)) from error
    requests = RequestBuilder(
        config,
        data.train,
        data.evaluation[: config.evaluate.max_prompts],
        data.train.weights,
        baseline=baseline_sampling(config, model.family),
    )
    return Prepared(config, model, algorithm, requests, shapes, data, sizes)


def sizes_of(config: Config, prompts: Prompts) -> list[Resolution]:
    """That images of these prompts can have."""
    drawn = () if prompts.all_sized else configured(config.rollout)
    return list(dict.fromkeys([*prompts.sizes, *drawn]))


def allowed_sizes(model: ResolvedModel, config: Config, data: Data) -> tuple[Resolution, ...]:
    """Every size that an image of the run can have, smallest first. Raises ValueError for one that the model cannot
    make, naming the key or the prompt's place."""
    both = (data.train, data.evaluation)
    where = {size: f"{place}: " for prompts in both for size, place in prompts.sizes.items()}
    if not all(prompts.all_sized for prompts in both):
        key = "rollout.resolutions: " if config.rollout.resolutions else ""
        where |= dict.fromkeys(configured(config.rollout), key)
    if config.rollout.engine == "vllm_omni" and (len(where) > 1 or not isinstance(next(iter(where)), int)):
        raise ValueError(
            "rollout.engine=vllm_omni makes square images of one size, got "
            f"{', '.join(in_words(size) for size in where)} px: use rollout.engine=diffusers"
        )
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
            # A family's files may be what is wrong, wherever the size comes from.
            raise ValueError(f"{place if str(error).startswith('resolution') else ''}{error}") from error
    return tuple(sorted(where, key=lambda size: (pixels(size), height_width(size))))


def check_tickets_per_batch(config: Config) -> None:
    """Raises ValueError for batches of more tickets than a step has."""
    size, tickets = config.rollout.tickets_per_batch, shape(config).tickets_per_step
    if size > tickets:
        raise ValueError(
            f"rollout.tickets_per_batch={size}, but a step has {tickets} tickets, and a batch never spans two steps: "
            f"set at most {tickets}, or ticket_size smaller"
        )


def check_trained(model: ResolvedModel, config: Config) -> None:
    """Raises ValueError for `lora.targets` that name no layer of the network and for `full.freeze` that names no
    parameter of it, or all; the network is built without weights."""
    named = config.full.freeze if config.tune == FULL else config.lora.targets is not None
    if named:
        from async_flowrl.policies.tuning import tuning_of

        policy = load_policy(model, dtype=model.dtype, device="cpu", parts="structure")
        tuning_of(config).check(policy)


def with_limits(config: Config, prompts: int) -> Config:
    """`epochs` over `prompts` training prompts, said in `total_steps`; whichever of the two ends sooner counts."""
    if config.epochs is None:
        return config
    steps = steps_for(config.epochs, prompts, config.prompts_per_step)
    return replace(config, total_steps=min(config.total_steps, steps))


def doubts_of(prepared: Prepared) -> list[str]:
    """Warnings, a sentence each, of what a run can do but its user may not mean."""
    model = prepared.model
    never_checked = unchecked(model.family, model.path, model.revision, resolution=prepared.sizes[-1])
    sentences = ends_before_its_epochs(prepared), never_checked, *too_slow(prepared.config)
    return [sentence for sentence in sentences if sentence is not None]


def ends_before_its_epochs(prepared: Prepared) -> str | None:
    """A sentence for a run that `total_steps` ends before its `epochs` are done."""
    config = prepared.config
    if config.epochs is None:
        return None
    steps = steps_for(config.epochs, len(prepared.requests.train), config.prompts_per_step)
    if config.total_steps >= steps:
        return None
    return f"epochs={config.epochs} would take {steps} steps; total_steps={config.total_steps} ends the run before"
