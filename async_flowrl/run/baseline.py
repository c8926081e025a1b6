"""The baseline of evaluations: how the base model is usually sampled, which is what a training has to beat."""

from dataclasses import replace

from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import load_family
from async_flowrl.tickets.request import evaluation_sampling
from async_flowrl.types import Sampling


def baseline_sampling(config: Config, family: str) -> Sampling | None:
    """The family's usual steps and guidance, but for what `evaluate.baseline_*` say; None where none is asked for.

    The tiny model has nothing usual: it is sampled as its evaluations are.
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
