"""Ticket → request: which prompt, which seeds, which steps get noise. Pure functions of the configuration."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from async_flowrl.algorithms.window import draw_window
from async_flowrl.config.resolution import configured, parse_resolution
from async_flowrl.config.schema import Config
from async_flowrl.data.curriculum import NO_SPREAD, SPREAD, UNKNOWN, Curriculum
from async_flowrl.data.sampler import Sampler
from async_flowrl.data.store import shared_texts
from async_flowrl.seeds import derive
from async_flowrl.tickets.table import EVALUATION, Ticket
from async_flowrl.types import Prompt, Resolution, RolloutRequest, Sampling


@dataclass(frozen=True)
class RequestBuilder:
    """Everything a ticket's images depend on besides the weights.

    With data.curriculum it is told of every trained step, and every attempt makes one of its own.
    """

    config: Config
    train: Sequence[Prompt]
    evaluation: Sequence[Prompt]
    weights: npt.NDArray[np.float64] | None = None
    """How often each training prompt is drawn, relative to the others; None for all alike."""
    outcomes: bytes = b""
    """What data.curriculum knows from the steps before this attempt."""
    baseline: Sampling | None = None
    """How the images of a baseline's tickets are sampled, where the run evaluates one."""

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
        """Prompts of evaluations that are training prompts, too, by their text."""
        return shared_texts(self.evaluation, self.train)

    @property
    def evaluated(self) -> str:
        """`held_out`, or `training` where an evaluation looks at a prompt that is trained."""
        return "training" if self.shared else "held_out"

    def prompt(self, ticket: Ticket) -> Prompt:
        if ticket.kind == EVALUATION:
            return self.evaluation[ticket.group]
        chosen = self.curriculum.choice(ticket.step).prompts if self.curriculum else self.sampler.step(ticket.step)
        return self.train[chosen[ticket.group]]

    def trained(self, step: int, spread: Sequence[bool | None]) -> dict[str, int]:
        """Tells data.curriculum, if it is on, which groups had advantages (None: no scores); what is shown of it."""
        if self.curriculum is None:
            return {}
        names = {True: SPREAD, False: NO_SPREAD, None: UNKNOWN}
        self.curriculum.record(step, [names[each] for each in spread])
        choice = self.curriculum.choice(step)
        return {"curriculum/epoch": choice.epoch, "curriculum/set_aside": choice.set_aside}

    def resolution(self, ticket: Ticket) -> Resolution:
        """Of all images of the ticket's group: its prompt's own, or the one that the group draws."""
        if (own := self.prompt(ticket).resolution) is not None:
            return own
        if ticket.kind == EVALUATION:
            return evaluation_resolution(self.config, ticket.group)
        return drawn_resolution(self.config, self.config.seed, ticket.step, ticket.group)

    def sampling(self, ticket: Ticket) -> Sampling:
        """How the images of a training ticket are sampled; the trainer must be told the same."""
        return sampling(self.config, self.resolution(ticket))

    def request(self, ticket: Ticket) -> RolloutRequest:
        return self._evaluation(ticket) if ticket.kind == EVALUATION else self._train(ticket)

    def image_seed(self, name: str, step: int, group: int, image: int) -> int:
        return derive(self.config.seed, name, step, group, image)

    def _train(self, ticket: Ticket) -> RolloutRequest:
        config = self.config
        size = config.images_per_ticket
        images = tuple(range(ticket.slice_index * size, (ticket.slice_index + 1) * size))
        window = draw_window(
            config.algorithm,
            num_inference_steps=config.rollout.num_inference_steps,
            seed=config.seed,
            step=ticket.step,
            group=ticket.group,
        )
        same = config.algorithm.same_initial_noise
        return RolloutRequest(
            kind=ticket.kind,
            ordinal=ticket.ordinal,
            step=ticket.step,
            group=ticket.group,
            version=ticket.version,
            prompt=self.prompt(ticket),
            images=images,
            initial_seeds=tuple(
                self.image_seed("initial", ticket.step, ticket.group, 0 if same else image) for image in images
            ),
            noise_seeds=tuple(self.image_seed("noise", ticket.step, ticket.group, image) for image in images),
            noise_steps=window.noise_steps,
            train_steps=window.train_steps,
            sampling=self.sampling(ticket),
        )

    def _evaluation(self, ticket: Ticket) -> RolloutRequest:
        config = self.config
        images = tuple(range(config.evaluate.images_per_prompt))
        seeds = tuple(derive(config.evaluate.seed, "evaluation", ticket.group, image) for image in images)
        how = self.baseline if ticket.baseline and self.baseline else evaluation_sampling(config)
        return RolloutRequest(
            kind=ticket.kind,
            ordinal=ticket.ordinal,
            step=ticket.step,
            group=ticket.group,
            version=ticket.version,
            prompt=self.prompt(ticket),
            images=images,
            initial_seeds=seeds,
            noise_seeds=seeds,
            noise_steps=(),
            train_steps=(),
            sampling=replace(how, resolution=self.resolution(ticket)),
        )


def drawn_resolution(config: Config, seed: int, *names: int | str) -> Resolution:
    """One of `rollout.resolutions`, all equally likely, or `rollout.resolution` where they are none."""
    sizes = configured(config.rollout)
    return sizes[derive(seed, "resolution", *names) % len(sizes)]


def evaluation_resolution(config: Config, place: int) -> Resolution:
    """Of an evaluation's prompt that brings no size, by its place: the same in every evaluation."""
    return drawn_resolution(config, config.evaluate.seed, EVALUATION, place)


def evaluation_sampling(config: Config) -> Sampling:
    """How evaluations sample: as training does, without noise after the initial one."""
    steps = config.evaluate.num_inference_steps or config.rollout.num_inference_steps
    return replace(sampling(config), sde_type="ode", noise_level=0.0, num_inference_steps=steps)


def sampling(config: Config, resolution: Resolution | None = None) -> Sampling:
    """How training images are sampled; the trainer uses the same guidance. None: at `rollout.resolution`."""
    rollout = config.rollout
    return Sampling(
        resolution=parse_resolution(rollout.resolution) if resolution is None else resolution,
        num_inference_steps=rollout.num_inference_steps,
        true_cfg_scale=rollout.true_cfg_scale,
        guidance_scale=rollout.guidance_scale,
        negative_prompt=rollout.negative_prompt,
        sde_type=config.algorithm.sde_type,
        noise_level=config.algorithm.noise_level,
    )
