"""Loads the rollout engine that `rollout.engine` names; each rollout worker calls it once."""

from collections.abc import Sequence
from functools import partial

import torch

from async_flowrl.config.paths import cache_dir
from async_flowrl.config.schema import Config
from async_flowrl.policies.kernels import compile_blocks
from async_flowrl.policies.one_base import OneBase
from async_flowrl.policies.registry import ResolvedModel, folder_of, load_policy
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.rollout.base import RolloutEngine
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.rollout.text_encoder import EmbeddingFiles, Parked, StoredEmbeddings, encoder_digest
from async_flowrl.types import EmbeddingKey

# `rollout.text_encoder` → `parts` of `load_policy`.
PARTS = {"resident": "all", "offload": "offload", "cached": "cached"}


def open_embeddings(
    config: Config,
    model: ResolvedModel,
    device: str,
    upcoming: Sequence[EmbeddingKey],
    worker: int = 0,
    base: OneBase | None = None,
) -> StoredEmbeddings | None:
    """Returns the encoder for `rollout.text_encoder=cached`, else None. ValueError if its folder cannot be created."""
    if config.rollout.text_encoder != "cached" or model.random:
        return None
    where = torch.device(device)
    digest = encoder_digest(folder_of(model, "text"), model, where, deterministic=config.deterministic)
    embeddings = StoredEmbeddings(
        EmbeddingFiles(cache_dir() / "embeddings", digest),
        partial(load_policy, model, dtype=model.dtype, device=device, parts="text"),
        upcoming,
        ahead=config.rollout.encode_ahead,
        worker=worker,
        workers=config.rollout.num_workers,
    )
    if base is not None:
        embeddings.aside = Parked(lambda: base.policy.transformer if base.is_read else None, where).aside
    return embeddings


def load_engine(
    config: Config,
    model: ResolvedModel,
    device: str,
    embeddings: StoredEmbeddings | None = None,
    base: OneBase | None = None,
) -> tuple[RolloutEngine, str]:
    """Returns the engine and the digest of its base weights. ValueError for an engine that is not installed."""
    if config.rollout.engine == "vllm_omni":
        from async_flowrl.rollout.vllm_omni.engine import VllmOmniEngine

        engine = VllmOmniEngine(config, model)
        return engine, engine.base_digest
    where = "resident" if model.random else config.rollout.text_encoder  # Random models have no text encoders.
    base = base or OneBase(model, parts=PARTS[where], device=device)
    policy, digest = base.policy, base.digest
    rollout = config.rollout
    if rollout.vae_slicing or rollout.vae_tiling:
        policy.decode_by_parts(images=rollout.vae_slicing, tiles=rollout.vae_tiling)
    tuning = tuning_of(config)
    tuning.attach(policy, config.seed)
    tuning.keep_compute_copies(policy.transformer)
    policy.transformer.requires_grad_(False).eval()
    if rollout.compile:
        compile_blocks(policy)
    if embeddings is not None:
        staying = list(tuning.parameters(policy.transformer).values())
        embeddings.aside = Parked(lambda: policy.transformer, torch.device(device), staying=staying).aside
    size = rollout.batch_size
    made = DiffusersEngine(
        policy, batch_size=size, device=device, text_encoder=where, tuning=tuning, encoder=embeddings
    )
    return made, digest
