"""Sampling settings of the baseline: an evaluation of the base model, sampled as usual, for comparison."""

from dataclasses import replace

from async_flowrl.config.check import guidance_refusal
from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import load_family
from async_flowrl.tickets.request import evaluation_sampling
from async_flowrl.types import Sampling


def baseline_sampling(config: Config, family: str) -> Sampling | None:
    """Returns the model family's usual denoising steps and guidance, unless `evaluate.baseline_*` set others.

    Returns None without `evaluate.baseline`. The tiny model has no usual settings; its evaluations' settings are used.
    Raises ValueError for an `evaluate.baseline_guidance` that the family's networks cannot have; which kind of guidance
    it is depends on the family.
    """
    if not config.evaluate.baseline:
        return None
    evaluate, sampling = config.evaluate, evaluation_sampling(config)
    embedded = sampling.guidance_scale > 0
    if config.model.path != "tiny":
        usual = load_family(family)
        true_cfg_scale, guidance_scale = usual.usual_guidance
        embedded = guidance_scale > 0
        sampling = replace(
            sampling,
            num_inference_steps=usual.usual_steps,
            true_cfg_scale=true_cfg_scale,
            guidance_scale=guidance_scale,
        )
    if evaluate.baseline_steps is not None:
        sampling = replace(sampling, num_inference_steps=evaluate.baseline_steps)
    if evaluate.baseline_guidance is not None:
        sampling = _guided(sampling, evaluate.baseline_guidance, embedded)
    return sampling


def _guided(sampling: Sampling, scale: float, embedded: bool) -> Sampling:
    """Returns `sampling` with `evaluate.baseline_guidance=scale`; `embedded`: it is an input of the network."""
    if refusal := guidance_refusal("evaluate.baseline_guidance", scale, embedded=embedded):
        raise ValueError(refusal)
    return replace(sampling, guidance_scale=scale) if embedded else replace(sampling, true_cfg_scale=scale)
