"""Loading of the engine that `rollout.engine` names."""

from async_flowrl.config.schema import Config
from async_flowrl.policies.kernels import compile_blocks
from async_flowrl.policies.registry import ResolvedModel, load_policy
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.rollout.base import RolloutEngine
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.rollout.together import TogetherEngine
from checkpoint_engine import base_digest

PARTS = {"resident": "all", "offload": "offload"}
"""`rollout.text_encoder` to the parts of the model that are loaded."""


def load_engine(config: Config, model: ResolvedModel, device: str) -> tuple[RolloutEngine, str]:
    """The engine, ready for versions of what is trained, and the base's digest, to be compared with the trainer's.

    Raises ValueError for an engine that is not installed.
    """
    if config.rollout.engine == "vllm_omni":
        from async_flowrl.rollout.vllm_omni.engine import VllmOmniEngine

        engine = VllmOmniEngine(config, model)
        return engine, engine.base_digest
    policy = load_policy(model, dtype=model.dtype, device=device, parts=PARTS[config.rollout.text_encoder])
    digest = base_digest(dict(policy.transformer.named_parameters()))
    tuning = tuning_of(config)
    tuning.attach(policy, config.seed)
    tuning.keep_compute_copies(policy.transformer)
    policy.transformer.requires_grad_(False).eval()
    if config.rollout.compile:
        compile_blocks(policy)
    size, where = config.rollout.batch_size, config.rollout.text_encoder
    kind = TogetherEngine if config.rollout.tickets_per_batch > 1 else DiffusersEngine
    return kind(policy, batch_size=size, device=device, text_encoder=where, tuning=tuning), digest
