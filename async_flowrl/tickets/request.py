"""The request builder: computes from a ticket the request that a rollout worker gets (prompt, seeds, noisy steps).

Its results depend on the configuration, the prompts, the ticket's numbers and, with `data.curriculum`, on rewards of
earlier steps; not on timing or on the worker.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice

import numpy as np
import numpy.typing as npt

from async_flowrl.algorithms.window import Window, draw_window
from async_flowrl.config.resolution import Resolution, configured, sized, with_frames
from async_flowrl.config.schema import Config
from async_flowrl.data.sampler import NO_SPREAD, SPREAD, UNKNOWN, Curriculum, Sampler
from async_flowrl.data.store import shared_texts
from async_flowrl.seeds import derive
from async_flowrl.tickets.table import EVALUATION, TRAIN, Ticket, TicketTable
from async_flowrl.types import EmbeddingKey, EncoderInput, Prompt, RolloutRequest, Sampling, TextWithImages


@dataclass(frozen=True)
class RequestBuilder:
    """Builds requests, which hold everything that an image depends on besides the weights; one for each start of a run.

    `data.curriculum` has a state: the controller calls `trained` after every training step.
    """

    config: Config
    train: Sequence[Prompt]  # Training prompts.
    evaluation: Sequence[Prompt]  # Evaluation prompts.
    # [len(train)] How often each training prompt is drawn, relative to the others; None means all equally often.
    weights: npt.NDArray[np.float64] | None = None
    # State of `data.curriculum` from a checkpoint: one byte per group of all steps trained before this start.
    outcomes: bytes = b""
    # Sampling of the baseline (an evaluation of the base model as it is usually sampled); None without a baseline.
    baseline: Sampling | None = None

    @cached_property
    def sampler(self) -> Sampler:
        config = self.config
        return Sampler(
            len(self.train),
            config.prompts_per_step,
            seed=config.seed,
            shuffle=config.data.shuffle,
            weights=self.weights,
        )

    @cached_property
    def curriculum(self) -> Curriculum | None:
        settings = self.config.data.curriculum
        if settings.after is None:
            return None
        return Curriculum(settings, self.sampler, lag=self.config.live_versions, outcomes=self.outcomes)

    @cached_property
    def shared(self) -> int:
        """Number of evaluation prompts whose text is also the text of a training prompt."""
        return shared_texts(self.evaluation, self.train)

    @property
    def evaluated(self) -> str:
        """`training` if at least one evaluation prompt is also a training prompt, else `held_out`."""
        return "training" if self.shared else "held_out"

    def prompt(self, ticket: Ticket) -> Prompt:
        if ticket.kind == EVALUATION:
            return self.evaluation[ticket.group]
        return self.train[self._chosen(ticket.step)[ticket.group]]

    @cached_property
    def batch_order(self) -> Callable[[int], tuple[int, ...]]:
        """Function that returns the groups of a step in the order in which batches of tickets take them (`batches`)."""
        # Cached, because every batch of a step asks for it.
        return lru_cache(maxsize=64)(lambda step: by_length([self.train[index] for index in self._chosen(step)]))

    def _chosen(self, step: int) -> Sequence[int]:
        return self.curriculum.choice(step).prompts if self.curriculum else self.sampler.step(step)

    def trained(self, step: int, spread: Sequence[bool | None]) -> dict[str, int]:
        """Records a trained step in the curriculum and returns the metrics `curriculum/*`; {} without a curriculum.

        `spread` says per group whether its rewards differed (None: no rewards). Raises RuntimeError for steps out of
        order.
        """
        if self.curriculum is None:
            return {}
        names = {True: SPREAD, False: NO_SPREAD, None: UNKNOWN}
        self.curriculum.record(step, [names[differs] for differs in spread])
        choice = self.curriculum.choice(step)
        return {"curriculum/epoch": choice.epoch, "curriculum/set_aside": choice.set_aside}

    def resolution(self, ticket: Ticket) -> Resolution:
        return self.size(self.prompt(ticket), ticket.kind, ticket.step, ticket.group)

    def size(self, prompt: Prompt, kind: str, step: int, group: int) -> Resolution:
        """Returns the image size of a group: the prompt's own, else one drawn from the configured sizes."""
        if prompt.resolution is not None:
            return with_frames(prompt.resolution, self.config.rollout.frames)
        if kind == EVALUATION:
            return evaluation_resolution(self.config, group)
        return drawn_resolution(self.config, self.config.seed, step, group)

    def sampling(self, ticket: Ticket) -> Sampling:
        """Returns the sampling settings of a training ticket, which its rollout worker and the trainer both get."""
        return sampling(self.config, self.resolution(ticket))

    def image_seed(self, name: str, step: int, group: int, image: int) -> int:
        """Returns the seed of image number `image` (from 0) of a group for the purpose `name`, e.g. `initial`."""
        return derive(self.config.seed, name, step, group, image)

    def request(self, ticket: Ticket) -> RolloutRequest:
        config, step, group = self.config, ticket.step, ticket.group
        window = Window((), ())
        if ticket.kind == EVALUATION:
            images = range(config.evaluate.images_per_prompt)
            initial = noise = [derive(config.evaluate.seed, "evaluation", group, image) for image in images]
            how = self.baseline if ticket.baseline and self.baseline else evaluation_sampling(config)
        else:
            size, same = config.images_per_ticket, config.algorithm.same_initial_noise
            images = range(ticket.slice_index * size, (ticket.slice_index + 1) * size)
            initial = [self.image_seed("initial", step, group, 0 if same else image) for image in images]
            noise = [self.image_seed("noise", step, group, image) for image in images]
            how, steps = sampling(config), config.rollout.num_inference_steps
            window = draw_window(config.algorithm, num_inference_steps=steps, seed=config.seed, step=step, group=group)
        return RolloutRequest(
            kind=ticket.kind,
            ordinal=ticket.ordinal,
            step=step,
            group=group,
            version=ticket.version,
            prompt=self.prompt(ticket),
            images=tuple(images),
            initial_seeds=tuple(initial),
            noise_seeds=tuple(noise),
            noise_steps=window.noise_steps,
            train_steps=window.train_steps,
            sampling=replace(how, resolution=self.resolution(ticket)),
        )


def drawn_resolution(config: Config, seed: int, *names: int | str) -> Resolution:
    """Returns one of `rollout.resolutions`, drawn from `seed` and `names`; if empty, `rollout.resolution`."""
    sizes = configured(config.rollout)
    return sizes[derive(seed, "resolution", *names) % len(sizes)]


def evaluation_resolution(config: Config, index: int) -> Resolution:
    """Returns the image size, in all evaluations, of evaluation prompt `index` (from 0) if it has none of its own."""
    return drawn_resolution(config, config.evaluate.seed, EVALUATION, index)


def evaluation_sampling(config: Config) -> Sampling:
    """Returns the sampling settings of evaluations: those of training, without noise in the denoising steps."""
    steps = config.evaluate.num_inference_steps or config.rollout.num_inference_steps
    return replace(sampling(config), sde_type="ode", noise_level=0.0, num_inference_steps=steps)


def sampling(config: Config, resolution: Resolution | None = None) -> Sampling:
    """Returns the sampling settings of training images; `resolution=None` means `rollout.resolution`."""
    rollout = config.rollout
    return Sampling(
        resolution=sized(rollout, rollout.resolution) if resolution is None else resolution,
        num_inference_steps=rollout.num_inference_steps,
        true_cfg_scale=rollout.true_cfg_scale,
        guidance_scale=rollout.guidance_scale,
        negative_prompt=rollout.negative_prompt,
        sde_type=config.algorithm.sde_type,
        noise_level=config.algorithm.noise_level,
        true_cfg_scale_2=rollout.true_cfg_scale_2,
    )


def teacher_of(teachers: Mapping[str, str], prompt: Prompt) -> str:
    """Returns the label of the prompt's teacher in `algorithm.teachers`, "" without any. ValueError for another one."""
    label = prompt.metadata.get("teacher")
    if not teachers or (len(teachers) == 1 and not label):
        return next(iter(teachers), "")
    if label not in teachers:
        which = f"has teacher={label!r}, algorithm.teachers are {', '.join(teachers)}"
        raise ValueError(f"prompt {prompt.text!r} {which}: give each prompt a column `teacher` with one of these")
    return str(label)


def asked_of(prompt: Prompt, how: Sampling) -> list[EmbeddingKey]:
    """Returns what is encoded for `prompt`: the prompt and, with classifier-free guidance, its negative prompt."""
    keys: list[EmbeddingKey] = [(_for_size(prompt.wording, how), prompt.system, False)]
    if how.true_cfg_scale > 1:
        keys.append((_for_size(prompt.negative_wording(how.negative_prompt), how), None, True))
    return keys


def _for_size(wording: EncoderInput, how: Sampling) -> EncoderInput:
    return replace(wording, size=how.resolution) if isinstance(wording, TextWithImages) else wording


def upcoming(requests: RequestBuilder, limit: int) -> tuple[EmbeddingKey, ...]:
    """Returns the first different texts that a run needs, at most `limit`: evaluations' first, without curriculum.

    At most MAX_TEXTS_READ_PER_TEXT × `limit` texts are read.
    """
    return tuple(islice(dict.fromkeys(islice(_all(requests), MAX_TEXTS_READ_PER_TEXT * limit)), limit))


# Most texts that `upcoming` reads per text that it may return; with few prompts, most texts are repetitions.
MAX_TEXTS_READ_PER_TEXT = 8


def _all(requests: RequestBuilder) -> Iterator[EmbeddingKey]:
    config = requests.config
    ways = [evaluation_sampling(config), *([requests.baseline] if requests.baseline else [])]
    for group, prompt in enumerate(requests.evaluation):
        size = requests.size(prompt, EVALUATION, 0, group)
        for how in ways:
            yield from asked_of(prompt, replace(how, resolution=size))
    for step in range(config.total_steps):
        for group, index in enumerate(requests.sampler.step(step)):
            prompt = requests.train[index]
            yield from asked_of(prompt, sampling(config, requests.size(prompt, TRAIN, step, group)))


def by_length(prompts: Sequence[Prompt]) -> tuple[int, ...]:
    """Returns the indices of the prompts by length: texts by UTF-8 bytes, then token ids."""
    return tuple(sorted(range(len(prompts)), key=lambda index: _length(prompts[index])))


def _length(prompt: Prompt) -> tuple[bool, int]:
    if prompt.token_ids is None:
        return False, len(prompt.text.encode())
    return True, len(prompt.token_ids)


def batch_of(table: TicketTable, ticket: Ticket, size: int, order: Sequence[int]) -> list[Ticket]:
    """Returns the tickets, of any state, made in one call with the training ticket `ticket`, itself included.

    They are `size`, or those that are left at the end of the step. `order` has the groups of its step in the order in
    which batches take them.
    """
    per_group = table.shape.tickets_per_group
    index = order.index(ticket.group) * per_group + ticket.slice_index
    start = index - index % size
    end = min(start + size, table.shape.tickets_per_step)
    first, last = start // per_group, -(-end // per_group)
    tickets = [member for group in order[first:last] for member in table.group(ticket.step, group)]
    return tickets[start - first * per_group : end - first * per_group]
