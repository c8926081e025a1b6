"""python -m async_flowrl.evaluate RUN: rewards of the base model and of the run's exported LoRA, in a fresh pipeline.

Nothing of the training loop takes part but the reward: diffusers' own pipeline loads the LoRA and makes the images.
With the run's own evaluation seed the initial noises, and so the images, are those of its evaluations.
"""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_flowrl.config.compose import read_config
from async_flowrl.config.schema import Config
from async_flowrl.data.prompts import load_prompts
from async_flowrl.generate import apply_lora, from_config, open_pipeline, run_pipeline
from async_flowrl.policies.base import Policy
from async_flowrl.policies.registry import family_of
from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.composite import CompositeReward
from async_flowrl.rewards.registry import build_reward
from async_flowrl.seeds import derive, generator
from async_flowrl.types import Prompt, Scores

logger = logging.getLogger(__name__)


def evaluate(config: Config, lora: Path | None, *, device: str = "cpu") -> dict[str, dict[str, float]]:
    """Mean rewards by name, and their weighted sum as `reward`: {"before": ...} and, given a LoRA, {"after": ...}.

    Prompts, rewards, image counts and seeds are those of the configuration's evaluations. Both means are over the
    prompts that have scores before and after. Raises ValueError where there are none.
    """
    reward = build_reward(config.reward)
    prompts = load_prompts(config.data, split="evaluation", needs_target=reward.needs_target)
    prompts = prompts[: config.evaluate.max_prompts]
    pipeline = open_pipeline(from_config(config), device)
    scores = {"before": asyncio.run(_score(pipeline, config, prompts, reward))}
    if lora is not None:
        apply_lora(pipeline, lora)
        scores["after"] = asyncio.run(_score(pipeline, config, prompts, reward))
    scored = sorted(set[int].intersection(*(set(by_prompt) for by_prompt in scores.values())))
    if not scored:
        raise ValueError(f"none of {len(prompts)} prompts could be scored")
    if len(scored) < len(prompts):
        logger.warning("means over %d of %d prompts", len(scored), len(prompts))
    return {
        when: _means([by_prompt[index] for index in scored], sorted(reward.weights))
        for when, by_prompt in scores.items()
    }


def _means(scores: Sequence[Scores], names: Sequence[str]) -> dict[str, float]:
    means = {name: float(np.mean([score.by_term[name] for score in scores])) for name in names}
    return {**means, "reward": float(np.mean([score.total for score in scores]))}


async def _score(
    pipeline: Any, config: Config, prompts: Sequence[Prompt], reward: CompositeReward
) -> dict[int, Scores]:
    """By the prompt's place in `prompts`; without those whose reward failed, where `reward.on_error` is skip."""
    settings = from_config(config)
    model = config.model
    policy = family_of(pipeline, model.family).around(
        pipeline, pipeline.transformer.dtype, max_sequence_length=model.max_sequence_length
    )
    scores = {}
    with ThreadPoolExecutor(config.reward.threads) as executor:
        for group, prompt in enumerate(prompts):
            latents = _noise(config, policy, group).to(pipeline.device, pipeline.transformer.dtype)
            text, options = _conditioning(policy, prompt)
            own = settings
            if prompt.negative is not None:
                own = replace(settings, sampling=replace(settings.sampling, negative_prompt=prompt.negative))
            images = run_pipeline(pipeline, own, text, num_images_per_prompt=len(latents), latents=latents, **options)
            try:
                scores[group] = await reward.score(prompt, images, executor)
            except RewardError as error:
                if config.reward.on_error == "fail":
                    raise ValueError(f"prompt {group} has no score: {error}") from error
                logger.warning("prompt %d is skipped: %s", group, error)
    return scores


def _conditioning(policy: Policy, prompt: Prompt) -> tuple[str | None, dict[str, Any]]:
    """The prompt as the pipeline takes it: as text, or as embeddings where it brings more than that."""
    like = next(policy.transformer.parameters())
    options: dict[str, Any] = {}
    if prompt.negative_token_ids is not None:
        (negative,) = policy.encode([prompt.negative_token_ids])
        options = {f"negative_{name}": torch.from_numpy(value)[None].to(like) for name, value in negative.items()}
        options["negative_prompt"] = None
    if prompt.system is None and prompt.token_ids is None:
        return prompt.text, options
    (encoded,) = policy.encode([prompt.wording], system=prompt.system)
    return None, options | {name: torch.from_numpy(value)[None].to(like) for name, value in encoded.items()}


def _noise(config: Config, policy: Policy, group: int) -> Tensor:
    """Initial latents [n, ...] in the family's layout, those that the run's evaluations begin with."""
    shape = policy.latent_shape(config.rollout.resolution)
    seeds = [derive(config.evaluate.seed, "evaluation", group, i) for i in range(config.evaluate.images_per_prompt)]
    return torch.stack([torch.randn(shape, generator=generator(seed)) for seed in seeds])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m async_flowrl.evaluate", description="Rewards before and after.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory with config.yaml and lora/")
    parser.add_argument("--lora", type=Path, help="another LoRA than RUN/lora")
    parser.add_argument("--seed", type=int, help="other initial noises than those of the run's evaluations")
    parser.add_argument("--images", type=int, help="images per prompt")
    parser.add_argument("--out", type=Path, help="also write the result there, as JSON")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run = given.run.expanduser()
    try:
        config = read_config(run / "config.yaml")
        config.evaluate.seed = config.evaluate.seed if given.seed is None else given.seed
        config.evaluate.images_per_prompt = given.images or config.evaluate.images_per_prompt
        lora = (given.lora or run / "lora").expanduser()
        rewards = evaluate(config, lora, device="cuda" if torch.cuda.is_available() else "cpu")
    except (ValueError, FileNotFoundError) as error:
        logger.error("%s", error)
        return 2
    text = json.dumps(rewards, indent=2)
    logger.info("%s", text)
    if given.out is not None:
        given.out.expanduser().write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
