"""Ticket → request: which prompt, which seeds, which steps get noise. Pure functions of the configuration."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from async_flowrl.algorithms.window import draw_window
from async_flowrl.config.schema import Config
from async_flowrl.data.sampler import prompts_for_step
from async_flowrl.seeds import derive
from async_flowrl.tickets.table import EVALUATION, Ticket
from async_flowrl.types import Prompt, RolloutRequest, Sampling


@dataclass(frozen=True)
class RequestBuilder:
    """Everything a ticket's images depend on besides the weights."""

    config: Config
    train: Sequence[Prompt]
    evaluation: Sequence[Prompt]

    def prompt(self, ticket: Ticket) -> Prompt:
        if ticket.kind == EVALUATION:
            return self.evaluation[ticket.group]
        config = self.config
        chosen = _prompts(len(self.train), config.prompts_per_step, config.seed, ticket.step, config.data.shuffle)
        return self.train[chosen[ticket.group]]

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
            sampling=sampling(config),
        )

    def _evaluation(self, ticket: Ticket) -> RolloutRequest:
        config = self.config
        images = tuple(range(config.evaluate.images_per_prompt))
        steps = config.evaluate.num_inference_steps or config.rollout.num_inference_steps
        seeds = tuple(derive(config.evaluate.seed, "evaluation", ticket.group, image) for image in images)
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
            sampling=replace(sampling(config), sde_type="ode", noise_level=0.0, num_inference_steps=steps),
        )


@lru_cache(maxsize=32)
def _prompts(num_prompts: int, prompts_per_step: int, seed: int, step: int, shuffle: bool) -> Sequence[int]:
    """Kept for the steps under way: every ticket asks several times, and drawing costs as much as the step is wide."""
    return prompts_for_step(num_prompts, prompts_per_step, seed=seed, step=step, shuffle=shuffle)


def sampling(config: Config) -> Sampling:
    """How training images are sampled; the trainer uses the same guidance."""
    rollout = config.rollout
    return Sampling(
        resolution=rollout.resolution,
        num_inference_steps=rollout.num_inference_steps,
        true_cfg_scale=rollout.true_cfg_scale,
        guidance_scale=rollout.guidance_scale,
        negative_prompt=rollout.negative_prompt,
        sde_type=config.algorithm.sde_type,
        noise_level=config.algorithm.noise_level,
    )
