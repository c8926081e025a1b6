"""Base class of model families on a diffusers pipeline: loads them, or builds them without weights for plans."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from async_flowrl.config.resolution import Resolution
from async_flowrl.policies import loading
from async_flowrl.policies.base import Shapes
from async_flowrl.policies.pipeline import PipelinePolicy, scale_factor
from async_flowrl.policies.stored import configuration
from async_flowrl.transfers import settle
from async_flowrl.types import Prompt, Sampling


class PipelineFamily:
    """Loads a `PipelinePolicy` from a diffusers folder or a hub name; a subclass names the classes.

    diffusers is imported only when something is loaded, because the controller uses families without loading.
    """

    policy: ClassVar[type[PipelinePolicy]]
    pipeline: ClassVar[str]
    """diffusers' class name of the pipeline."""
    transformer: ClassVar[str]
    """diffusers' class name of the transformer."""
    layer_keys: ClassVar[tuple[str, ...]] = ("num_layers",)
    """Keys of the transformer's configuration that are numbers of blocks."""
    tokenizer: ClassVar[str] = "tokenizer"
    """Folder of the tokenizer whose limit cuts long prompts."""
    text_tokens: ClassVar[int] = 512
    """Default of the pipeline's `max_sequence_length`."""
    scale_factor: Callable[[Mapping[str, Any]], int] = staticmethod(scale_factor)
    """Function of the VAE's configuration: side of one latent in pixels."""
    usual_guidance: tuple[float, float]
    usual_steps: int

    def load(
        self,
        path: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parts: str,
        revision: str | None = None,
        max_sequence_length: int | None = None,
    ) -> PipelinePolicy:
        """Loads the model; see `PolicyFamily.load`, also for `parts`."""
        import diffusers

        kind: Any = getattr(diffusers, self.transformer)
        # A trainer rank does not import the pipeline, which would bring its text encoder's code.
        stock: Any = None if parts in ("transformer", "structure") else getattr(diffusers, self.pipeline)
        options, pipeline = loading.weight_options(dtype, revision), None
        with loading.quiet():
            if parts in ("all", "offload", "cached"):
                if parts == "cached":
                    known = inspect.signature(stock).parameters
                    options |= dict.fromkeys(name for name in loading.TEXT_ENCODERS if name in known)
                pipeline = loading.load_whole(stock, path, device, text_on_host=parts == "offload", **options)
                return self.around(pipeline, dtype, max_sequence_length=max_sequence_length)
            if parts in ("structure", "text"):
                described = kind.load_config(path, subfolder="transformer", revision=revision)
                transformer: Any = structure(kind, described, dtype)
                if parts == "text":
                    pipeline = loading.load_whole(stock, path, device, vae=None, transformer=None, **options)
                    # Some pipelines read its configuration when they encode.
                    pipeline.register_modules(transformer=transformer)
            else:
                transformer = kind.from_pretrained(path, subfolder="transformer", **options)
                settle(transformer, device)
            scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(
                path, subfolder="scheduler", revision=revision
            )
            vae = configuration(path, "vae", revision)
        options = {"dtype": dtype, "pipeline": pipeline, "max_sequence_length": max_sequence_length}
        return self.policy_of(transformer, scheduler, vae, **options)

    def policy_of(self, transformer: Any, scheduler: Any, vae: Mapping[str, Any], **options: Any) -> PipelinePolicy:
        """Returns the policy of a network; `vae` is the configuration of its VAE, `options` are PipelinePolicy's."""
        side = self.policy.pixels_per_token(vae, transformer.config)
        return self.policy(transformer, scheduler, side=side, **options)

    def framed(self, tokenizer: Any, text: str, limit: int) -> tuple[str, int, int]:
        """Returns the text that is tokenised for a prompt, where the prompt begins in it, and how many tokens are read.

        `limit` is `max_sequence_length`. Here it is the prompt alone, and tokens for begin and end take places.
        """
        return text, 0, limit - int(tokenizer.num_special_tokens_to_add())

    def around(self, pipeline: Any, dtype: torch.dtype, *, max_sequence_length: int | None = None) -> PipelinePolicy:
        """Returns the policy of a loaded diffusers pipeline."""
        options = {"dtype": dtype, "pipeline": pipeline, "max_sequence_length": max_sequence_length}
        return self.policy_of(pipeline.transformer, pipeline.scheduler, pipeline.vae.config, **options)

    def stacks(self, transformer: Mapping[str, Any]) -> dict[str, int]:
        """Returns name → number of the blocks that are alike, for a plan; empty if a class does not name them.

        `transformer` is the network's configuration.
        """
        import diffusers

        usual = inspect.signature(getattr(diffusers, self.transformer).__init__).parameters
        return {
            key: int(transformer.get(key, usual[key].default))
            for key in self.layer_keys
            if key in transformer or key in usual
        }

    def with_stacks(self, transformer: Mapping[str, Any], stacks: Mapping[str, int]) -> dict[str, Any]:
        """Returns the network's configuration with other numbers of blocks."""
        return {**transformer, **stacks}

    def described(
        self, path: str, *, revision: str | None = None, max_sequence_length: int | None = None
    ) -> PipelinePolicy:
        """Returns a policy with neither network nor schedule, from the configurations of transformer and VAE."""
        described, vae = (configuration(path, part, revision) for part in ("transformer", "vae"))
        bare: Any = SimpleNamespace(config=SimpleNamespace(**described))
        side, longest = self.policy.pixels_per_token(vae, described), max_sequence_length
        return self.policy(bare, None, side=side, dtype=torch.float32, max_sequence_length=longest)

    def shapes(self, path: str, resolution: Resolution, **options: Any) -> Shapes:
        """Returns shapes from the configurations of transformer and VAE; see `PolicyFamily.shapes`."""
        return self.described(path, **options).shapes(resolution)

    def check_prompts(self, prompts: Sequence[Prompt], path: str, *, revision: str | None = None) -> None:
        """Raises ValueError for system prompts and token ids that the model cannot encode."""
        title = self.policy.title
        for prompt in prompts:
            if prompt.system is not None and not self.policy.has_system_prompt:
                raise ValueError(f"{title} has no system prompt, prompt {prompt.index} brings {prompt.system!r:.60}")
        if with_ids := [prompt for prompt in prompts if prompt.token_ids or prompt.negative_token_ids]:
            self.check_token_ids(with_ids, path, revision=revision)

    def check_token_ids(self, prompts: Sequence[Prompt], path: str, *, revision: str | None) -> None:
        """Raises ValueError, naming the prompt, for token ids that are not a prompt of the model.

        This default refuses all token ids; it is right for families with several text encoders, whose vocabularies
        differ.
        """
        raise ValueError(f"{self.policy.title} takes prompts as text, prompt {prompts[0].index} brings token ids")

    def guidance_arguments(self, sampling: Sampling) -> dict[str, Any]:
        return self.policy.guidance_arguments(sampling)


def structure(kind: Any, described: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Returns a network of class `kind` as `from_pretrained` builds it before it reads weights.

    Parameters are on the meta device; buffers that the class computes have their values.
    """
    from accelerate import init_empty_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights():
            network: nn.Module = kind.from_config(dict(described))
    finally:
        torch.set_default_dtype(before)
    saved = network.state_dict(keep_vars=True)
    for name, buffer in network.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return network.eval().requires_grad_(False)
