"""Base class of model families, for the rollout engine and the trainer; one file per family implements it."""

import inspect
import logging
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from packaging.version import Version
from torch import nn

from async_flowrl.config.resolution import Resolution
from async_flowrl.policies.pipeline import TEXT_ENCODERS, PipelinePolicy, Shapes, scale_factor
from async_flowrl.policies.quantizer import NOT_QUANTIZED, Quantizer
from async_flowrl.policies.stored import (
    EXPERTS,
    FOLDER,
    boundary_ratio,
    configuration,
    network_folders,
    on_meta,
)
from async_flowrl.transfers import settle
from async_flowrl.types import Prompt, Sampling


class PipelineFamily:
    """A model family: loads a `PipelinePolicy` from a diffusers folder or a hub name, and answers questions about it.

    A subclass names diffusers' classes, and is constructed without arguments. `usual_guidance` (true_cfg_scale,
    guidance_scale) and `usual_steps` are those with which its models are sampled. diffusers is imported only when
    something is loaded, because the controller uses families without loading.
    """

    usual_guidance: tuple[float, float]
    usual_steps: int

    policy: ClassVar[type[PipelinePolicy]]
    pipeline: ClassVar[str]
    transformer: ClassVar[str]
    # Keys of the transformer's configuration that are numbers of blocks.
    layer_keys: ClassVar[tuple[str, ...]] = ("num_layers",)
    # First version of diffusers that has these classes.
    since: ClassVar[str] = "0.40"
    # Folder of the tokenizer whose limit cuts long prompts.
    tokenizer: ClassVar[str] = "tokenizer"
    # Default of the pipeline's `max_sequence_length`.
    text_tokens: ClassVar[int] = 512
    # Function of the VAE's configuration: side of one latent in pixels.
    scale_factor: Callable[[Mapping[str, Any]], int] = staticmethod(scale_factor)

    def load(
        self,
        path: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parts: str,
        revision: str | None = None,
        max_sequence_length: int | None = None,
        quantizer: Quantizer = NOT_QUANTIZED,
    ) -> PipelinePolicy:
        """Loads the model at `path` (a local folder, or a hub name at `revision`) in `dtype` on `device`.

        `parts` says what is loaded: "all" (transformer, text encoders, VAE), "offload" (all, text encoders in host
        memory), "cached" (all but the text encoders), "text" (only text encoders; the transformer has no weights),
        "vae" (only the VAE; the same), "transformer", or "structure" (the transformer on the meta device, whose weights
        the FSDP ranks fill in later). Rollout workers use the first four, the trainer the last three.
        `max_sequence_length` is the longest prompt in tokens; None means the default of the diffusers pipeline.
        """
        import diffusers

        kind = self.network_class()
        # A trainer rank does not import the pipeline, which would bring its text encoder's code.
        stock: Any = None if parts in ("transformer", "structure") else getattr(diffusers, self.pipeline)
        options, pipeline = weight_options(dtype, revision), None
        options |= self.own_parts(path, revision) if stock else {}
        with quiet():
            if parts in ("all", "offload", "cached"):
                if parts == "cached":
                    options |= dict.fromkeys(_text_encoders(stock))
                if (quantized := quantizer.loaded(lambda: self.structure(path, dtype, revision), device)) is not None:
                    options |= self.components(quantized)
                pipeline = load_whole(
                    stock, path, device, text_on_host=parts == "offload", quantizer=quantizer, **options
                )
                return self.around(pipeline, dtype, max_sequence_length=max_sequence_length)
            if parts in ("structure", "text", "vae"):
                transformer: Any = quantizer.quantized(self.structure(path, dtype, revision))
                if stock:
                    networks = self.components(transformer)
                    # The VAE, too, encodes images that are edited.
                    others = _text_encoders(stock) if parts == "vae" else [] if self.policy.images[1] else ["vae"]
                    options |= dict.fromkeys([*networks, *others])
                    pipeline = load_whole(stock, path, device, quantizer=quantizer, **options)
                    # Some pipelines read its configuration when they encode.
                    pipeline.register_modules(**networks)
            elif (loaded := quantizer.loaded(lambda: self.structure(path, dtype, revision), device)) is not None:
                transformer = loaded
            else:
                networks = {
                    folder: kind.from_pretrained(path, subfolder=folder, device_map={"": device}, **options)
                    for folder in network_folders(path, revision)
                }
                transformer = self.joined(networks, boundary_ratio(path, revision))
                settle(transformer, device)
            scheduler = euler_scheduler(path, revision)
            vae = configuration(path, "vae", revision)
        options = {"dtype": dtype, "pipeline": pipeline, "max_sequence_length": max_sequence_length}
        return self.policy_of(transformer, scheduler, vae, **options)

    def structure(self, path: str, dtype: torch.dtype, revision: str | None = None) -> nn.Module:
        return self.network(configuration(path, "transformer", revision), dtype, boundary_ratio(path, revision))

    def network(self, config: Mapping[str, Any], dtype: torch.dtype, ratio: float | None) -> nn.Module:
        """Returns the network on the meta device; with `ratio` (`boundary_ratio`) it is two alike."""
        folders, kind = (FOLDER,) if ratio is None else EXPERTS, self.network_class()
        return self.joined({folder: structure(kind, config, dtype) for folder in folders}, ratio)

    def joined(self, networks: Mapping[str, nn.Module], ratio: float | None) -> nn.Module:
        """Returns a pipeline's networks, by their names there, as the one that a policy has; ValueError for two."""
        if ratio is not None:
            raise ValueError(f"{self.policy.title} has one network, and model_index.json has boundary_ratio={ratio}")
        return networks[FOLDER]

    def network_class(self) -> Any:
        """Returns diffusers' class `transformer`. Raises ValueError for a family that loads a network of its own."""
        import diffusers

        if not hasattr(diffusers, self.transformer):
            raise ValueError(
                f"diffusers has no {self.transformer}: {type(self).__name__} must name a class of diffusers, or "
                "override load, shapes and check_prompts (then without plans, random and quantised weights)"
            )
        return getattr(diffusers, self.transformer)

    def components(self, network: nn.Module) -> dict[str, nn.Module]:
        """Returns the networks of a policy's network by their names in the pipeline."""
        return {FOLDER: network}

    def own_parts(self, path: str | None, revision: str | None = None) -> dict[str, Any]:
        """Returns the pipeline's parts that diffusers should not load itself; of no path, parts that need no files."""
        return {}

    def float32_parts(self) -> frozenset[str]:
        """Returns parts of names of the network's weights that are float32 in any `model.dtype`, as in diffusers."""
        import diffusers

        return kept_in_float32(getattr(diffusers, self.transformer, None))

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
        """Returns the policy of a loaded diffusers pipeline, for tools that also sample with that pipeline."""
        options = {"dtype": dtype, "pipeline": pipeline, "max_sequence_length": max_sequence_length}
        networks = {name: part for name in EXPERTS if (part := getattr(pipeline, name, None)) is not None}
        network = self.joined(networks, pipeline.config.get("boundary_ratio"))
        return self.policy_of(network, pipeline.scheduler, pipeline.vae.config, **options)

    def stacks(self, transformer: Mapping[str, Any]) -> dict[str, int]:
        """Returns name → number of the blocks that are alike, for a plan; empty if they have no names."""
        usual = inspect.signature(self.network_class().__init__).parameters
        keys = [key for key in self.layer_keys if key in transformer or key in usual]
        return {key: int(transformer[key] if key in transformer else usual[key].default) for key in keys}

    def with_stacks(self, transformer: Mapping[str, Any], stacks: Mapping[str, int]) -> dict[str, Any]:
        """Returns the network's configuration with other numbers of blocks."""
        return {**transformer, **stacks}

    def described(
        self, path: str, *, revision: str | None = None, max_sequence_length: int | None = None
    ) -> PipelinePolicy:
        """Returns a policy with neither network nor schedule, from the configurations of transformer and VAE."""
        bare: Any = SimpleNamespace(config=SimpleNamespace(**configuration(path, "transformer", revision)))
        side, longest = self.token_side(path, revision), max_sequence_length
        return self.policy(bare, None, side=side, dtype=torch.float32, max_sequence_length=longest)

    def token_side(self, path: str, revision: str | None = None) -> int:
        """Returns the side in pixels of what a token covers, from the configurations of transformer and VAE."""
        config, vae = (configuration(path, part, revision) for part in ("transformer", "vae"))
        return self.policy.pixels_per_token(vae, config)

    def shapes(self, path: str, resolution: Resolution, *, images: int = 0, **options: Any) -> Shapes:
        """Returns shapes from the model's configuration files. Raises ValueError for a size that it cannot make."""
        policy = self.described(path, **options)
        policy.planned_images = max(images, policy.images[0])
        return policy.shapes(resolution)

    def check_length(self, prompt: Prompt, tokenizer: Any | None, side: int) -> None:
        """Raises ValueError for a prompt with more tokens of text and images than the network has positions for.

        Also for images of sizes that it cannot edit; `side` is that of a token in pixels. Without a tokenizer, tokens
        of the text are estimated.
        """

    def check_prompts(self, prompts: Sequence[Prompt], path: str, *, revision: str | None = None) -> None:
        """Raises ValueError, one sentence, for a system prompt or token ids that the model cannot encode.

        It is called at start-up with the prompts that have one of them, and loads no weights.
        """
        title = self.policy.title
        for prompt in prompts:
            if prompt.system is not None and not self.policy.has_system_prompt:
                raise ValueError(f"{title} has no system prompt, prompt {prompt.index} brings {prompt.system!r:.60}")
        if with_ids := [prompt for prompt in prompts if prompt.token_ids or prompt.negative_token_ids]:
            self.check_token_ids(with_ids, path, revision=revision)

    def check_token_ids(self, prompts: Sequence[Prompt], path: str, *, revision: str | None) -> None:
        """Raises ValueError for token ids: families with several text encoders have several vocabularies."""
        raise ValueError(f"{self.policy.title} takes prompts as text, prompt {prompts[0].index} brings token ids")

    def guidance_arguments(self, sampling: Sampling) -> dict[str, Any]:
        """Returns the guidance of `sampling` as keyword arguments of the diffusers pipeline's `__call__`."""
        return self.policy.guidance_arguments(sampling)


def _text_encoders(stock: Any) -> set[str]:
    return inspect.signature(stock).parameters.keys() & set(TEXT_ENCODERS)


def structure(kind: Any, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Returns a network of class `kind` as `from_pretrained` builds it before it reads weights.

    Parameters are on the meta device; buffers that the class computes have their values.
    """
    with on_meta(dtype):
        network: nn.Module = kind.from_config(dict(config))
    saved = network.state_dict(keep_vars=True)
    for name, buffer in network.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    for name, parameter in network.named_parameters():
        if not kept_in_float32(kind).isdisjoint(name.split(".")):
            parameter.data = parameter.data.float()
    return network.eval().requires_grad_(False)


def kept_in_float32(kind: Any) -> frozenset[str]:
    """Returns parts of names of weights that diffusers keeps in float32 in a network of class `kind` of any dtype."""
    return frozenset(getattr(kind, "_keep_in_fp32_modules", None) or ())


def weight_options(dtype: torch.dtype, revision: str | None) -> dict[str, Any]:
    """Returns keyword arguments for every `from_pretrained`: dtype, revision, and safetensors only."""
    import diffusers

    name = "dtype" if Version(diffusers.__version__) >= Version("0.42") else "torch_dtype"
    return {name: dtype, "revision": revision, "use_safetensors": True}


def euler_scheduler(path: str, revision: str | None = None) -> Any:
    """Returns an Euler scheduler of a folder's settings; a `flow_shift` in them is applied by `with_euler_steps`."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    logger = logging.getLogger("diffusers.configuration_utils")
    logger.addFilter(_of_more_than_flow_shift)
    try:
        return FlowMatchEulerDiscreteScheduler.from_pretrained(path, subfolder="scheduler", revision=revision)
    finally:
        logger.removeFilter(_of_more_than_flow_shift)


def _of_more_than_flow_shift(record: logging.LogRecord) -> bool:
    # diffusers warns that it ignores {'flow_shift': 3.0}.
    return re.search(r"attributes {'flow_shift': [^,]*} were passed", record.getMessage()) is None


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager: hides the progress bars of diffusers and transformers, because many processes load at once."""
    import diffusers
    import transformers

    loggers = (diffusers.utils.logging, transformers.utils.logging)
    shown = [logger for logger in loggers if logger.is_progress_bar_enabled()]
    for logger in shown:
        logger.disable_progress_bar()
    try:
        yield
    finally:
        for logger in shown:
            logger.enable_progress_bar()


def load_whole(
    stock: Any,
    path: str,
    device: torch.device,
    *,
    text_on_host: bool = False,
    quantizer: Quantizer = NOT_QUANTIZED,
    **options: Any,
) -> Any:
    """Loads the pipeline of class `stock`, settled on `device`; a part for which `options` have None is left out."""

    def text() -> dict[str, Any]:
        others = options | {"transformer": None, "vae": None}
        loaded = stock.from_pretrained(path, trust_remote_code=False, **others)
        settle_pipeline(loaded, torch.device("cpu"))
        return {name: part for name, part in loaded.components.items() if part is not None}

    host_parts: dict[str, Any] = {}
    if quantizer.text is not None and TEXT_ENCODERS[0] not in options:  # With None in options they are left out.
        dtype = next(value for value in options.values() if isinstance(value, torch.dtype))
        host_parts = quantizer.text_encoders(path, dtype, text, torch.device("cpu") if text_on_host else device)
    elif text_on_host:
        host_parts = text()
    pipeline = stock.from_pretrained(path, device_map=device.type, trust_remote_code=False, **options | host_parts)
    settle_pipeline(pipeline, device, except_for=host_parts)
    return pipeline


def settle_pipeline(pipeline: Any, device: torch.device, *, except_for: Container[str] = ()) -> None:
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module) and name not in except_for:
            settle(component, device)
