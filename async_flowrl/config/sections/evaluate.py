"""The section `evaluate` of the configuration: held-out prompts, and the evaluations made with them."""

from dataclasses import dataclass, field

from async_flowrl.config.sections.reward import RewardTerm
from async_flowrl.config.settings import MAX_SEED, setting


@dataclass
class HeldOutConfig:
    """Held-out terms: rewards that score only evaluations."""

    terms: dict[str, RewardTerm] = field(default_factory=dict)
    """Name → term as in reward.terms, which is never trained on. The sign of its weight says which direction is better;
    with weight 0 the scores are only shown. The first reward pool scores it, or its own pool if it sets workers,
    gpus_per_worker or threads; its failures do not end the run."""


@dataclass
class EvaluateConfig:
    """Evaluations, which run at the same time as training and do not change it."""

    every: int = setting(0, at_least=0)
    """Training steps between evaluations; 0 = only at the end (and before training, if asked)."""
    before_training: bool = True
    """Also evaluate the weights with which the run starts."""
    images_per_prompt: int = setting(8, at_least=1)
    """Images per prompt, from the same initial noises each time."""
    max_prompts: int = setting(16, at_least=1)
    """Prompts used, from the beginning of the file."""
    num_inference_steps: int | None = setting(None, at_least=1)
    """Denoising steps; null = as in training. Denoising steps of evaluations add no noise."""
    seed: int = setting(1234, at_least=0, at_most=MAX_SEED)
    """Seed of the initial noise; the same in every run, so that evaluations can be compared."""
    reward: HeldOutConfig = field(default_factory=HeldOutConfig)
    baseline: bool = False
    """Also evaluate the base model once, before training, with its family's usual denoising steps and guidance, to
    compare the training with it. Needs lora.path=null."""
    baseline_steps: int | None = setting(None, at_least=1)
    """Denoising steps of the baseline; null = the model family's usual number (model.path=tiny: as in evaluations)."""
    baseline_guidance: float | None = setting(None, at_least=0)
    """Guidance scale of the baseline: guidance_scale for families that take it as a network input, else true_cfg_scale.
    It must be above 0 for the former, and above 1, or 0 or 1 for none, for the others. null = the family's usual
    value."""
    on_hacking: str = setting("warn", choices=("warn", "stop", "ignore"))
    """Reaction if the trained reward rises while a held-out term gets worse by more than its noise: warn; stop (the run
    ends, can be resumed, and has the best version's weights if save.best is set); or ignore. See
    docs/reward_hacking.md."""
