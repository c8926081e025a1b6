"""Sampling settings of the baseline: an evaluation of the base model, sampled as usual, for comparison."""

from dataclasses import replace

from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import load_family
from async_flowrl.tickets.request import evaluation_sampling
from async_flowrl.types import Sampling


def baseline_sampling(config: Config, family: str) -> Sampling | None:
    """Returns the model family's usual denoising steps and guidance, unless `evaluate.baseline_*` set others.

    Returns None without `evaluate.baseline`. The tiny model has no usual settings; its evaluations' settings are used.
    """
    if not config.evaluate.baseline:
        return None
    evaluate, found = config.evaluate, evaluation_sampling(config)
    embedded = found.guidance_scale > 0
    if config.model.path != "tiny":
        usual = load_family(family)
        true_cfg_scale, guidance_scale = usual.usual_guidance
        embedded = guidance_scale > 0
        found = replace(
            found,
            num_inference_steps=usual.usual_steps,
            true_cfg_scale=true_cfg_scale,
            guidance_scale=guidance_scale,
        )
    if evaluate.baseline_steps is not None:
        found = replace(found, num_inference_steps=evaluate.baseline_steps)
    if evaluate.baseline_guidance is not None:
        scale = evaluate.baseline_guidance
        found = replace(found, guidance_scale=scale) if embedded else replace(found, true_cfg_scale=scale)
    return found
