"""The registry of model families: resolves `model.path` (`resolve_model`) and loads the model (`load_policy`)."""

import importlib.metadata
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import parse_safetensors_file_metadata, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, SafetensorsParsingError
from packaging.version import Version
from safetensors import SafetensorError, safe_open

from async_flowrl.config.check import check_fields
from async_flowrl.config.error_text import did_you_mean, first_line, in_one_line, unknown_name
from async_flowrl.config.hub import download, hub_answers, hub_file
from async_flowrl.config.models import PIPELINES, TINY, architectures, local_index, not_found
from async_flowrl.config.own_code import import_named
from async_flowrl.config.resolution import Resolution
from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies.kernels import use_attention
from async_flowrl.policies.pipeline import PipelinePolicy, Shapes
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.policies.quantizer import KeptWeights, QuantizedWeights, Quantizer, kept_base
from async_flowrl.policies.stored import (
    FILE,
    FOLDER,
    StoredWeights,
    Weights,
    file_states,
    indexed,
    json_file,
    network_folders,
    weights_files,
)
from async_flowrl.transfers import ONE_AT_A_TIME
from async_flowrl.types import Prompt

logger = logging.getLogger(__name__)

# Name of a model family → `pkg.module:attr` of its class.
FAMILIES = {
    "qwen_image": "async_flowrl.policies.qwen_image:QwenImageFamily",
    "qwen_image_21": "async_flowrl.policies.qwen_image_21:QwenImage21Family",
    "qwen_image_edit": "async_flowrl.policies.qwen_image_edit:QwenImageEditFamily",
    "sd3": "async_flowrl.policies.sd3:SD3Family",
    "flux": "async_flowrl.policies.flux:FluxFamily",
    "flux_kontext": "async_flowrl.policies.flux_kontext:FluxKontextFamily",
    "flux2_klein": "async_flowrl.policies.flux2_klein:Flux2KleinFamily",
    "z_image": "async_flowrl.policies.z_image:ZImageFamily",
    "sana": "async_flowrl.policies.sana:SanaFamily",
    "wan": "async_flowrl.policies.wan:WanFamily",
    "wan_image": "async_flowrl.policies.wan_image:WanImageFamily",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Values of `parts` in `load_policy`.
PARTS = ("all", "offload", "cached", "text", "vae", "transformer", "structure")
# Prompts that a family checks per call; each call loads the tokenizer.
PROMPTS_AT_A_TIME = 32_768
# Tokens that a template and the tokenizer may add. A text never has more tokens than bytes, so one of fewer bytes than
# the limit less these is not tokenised.
MARGIN = 16


@dataclass(frozen=True)
class ResolvedModel:
    """The settings `model.*` after all defaults are replaced by values.

    `path` is a local diffusers folder or a hub name, `revision` its commit on the hub. `random`: weights are drawn from
    seeds, and `path` is a folder that needs no files but configurations; `published` is then the name of the model that
    it describes, from which every node writes that folder.
    """

    path: str
    family: str
    revision: str | None
    dtype: str
    max_sequence_length: int | None = None
    attention_backend: str | None = None
    random: bool = False
    published: str | None = None
    quantize: str | None = None
    quantize_text_encoder: str | None = None

    @property
    def keeps_copy(self) -> bool:
        """Whether each node keeps what is quantised (`keep_copy`); drawn weights are quantised at each loading."""
        return bool(self.quantize or self.quantize_text_encoder) and not self.random

    @property
    def is_distilled(self) -> bool:
        """Whether the stock pipeline leaves out classifier-free guidance."""
        return bool(json_file(self.path, "model_index.json", self.revision).get("is_distilled"))

    @property
    def usual_guidance(self) -> tuple[float, float]:
        """(true_cfg_scale, guidance_scale) of the family, without classifier-free guidance for a distilled model."""
        scale, embedded = load_family(self.family).usual_guidance
        return 1.0 if self.is_distilled else scale, embedded

    def check_distilled(self, scales: Mapping[str, float | None]) -> None:
        """Raises ValueError for guidance of a distilled model; `scales` are its classifier-free scales by name."""
        for name, scale in scales.items():
            if scale is not None and scale > 1 and self.is_distilled:
                raise ValueError(
                    f"model.path {self.path} is distilled (is_distilled of model_index.json), so its stock pipeline "
                    f"has no guidance: {name} must be 1, got {scale:g}"
                )


def resolve_model(config: ModelConfig) -> ResolvedModel:
    """Builds the tiny model, checks a local folder, or looks up a hub name; loads no weights. Raises ValueError."""
    check_fields(config, "model.")
    if config.family not in ("auto", *FAMILIES):
        if ":" not in config.family:
            raise ValueError(unknown_name("model.family", config.family, ["auto", *FAMILIES]))
        load_family(config.family)
    random = config.weights == "random"
    if random and config.path != TINY and config.path not in architectures() and local_index(config.path) is None:
        names = ", ".join(architectures())
        raise ValueError(f"model.weights=random knows {names} and local folders, got model.path {config.path!r}")
    published = config.path if random and config.path in architectures() else None
    path, family, revision = _published(published, config.family) if published else _located(config)
    stored = {"quantize": config.quantize, "quantize_text_encoder": config.quantize_text_encoder}
    if ":" in family and (random or any(stored.values())):
        load_family(family).network_class()
    dtype, length, attention = _dtype(config, path, revision), config.max_sequence_length, config.attention_backend
    return ResolvedModel(path, family, revision, dtype, length, attention, random, published, **stored)


def _published(name: str, family: str = "auto") -> tuple[str, str, None]:
    from async_flowrl.policies.random_weights import described_folder

    usual = architectures()[name].family
    folder = described_folder(name, architectures()[name], load_family(usual))
    return str(folder), usual if family == "auto" else family, None


def _dtype(config: ModelConfig, path: str, revision: str | None) -> str:
    folder, local = Path(path) / FOLDER, revision is None and config.weights == "files"
    if local and any(folder.glob(f"{FILE.removesuffix('.safetensors')}*")):
        try:
            weights_files(folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"model.path {path}: {error}") from error
    if config.dtype != "auto":
        return config.dtype
    if config.weights == "random" and config.path in architectures():
        return architectures()[config.path].dtype
    if config.weights == "random" and not any(folder.glob("*.safetensors")):
        return "bfloat16"
    return dtype_of_files(path, revision)


def _located(config: ModelConfig) -> tuple[str, str, str | None]:
    path, revision = config.path, None
    if config.path == TINY:
        from async_flowrl.policies.tiny import build_tiny

        if config.tiny.family in FAMILIES:
            load_family(config.tiny.family)
        path = str(build_tiny(config.tiny))
        index = Path(path) / "model_index.json"
    elif (local := local_index(config.path)) is not None:
        path, index = str(local.parent.resolve()), local
    else:
        index, revision = _hub_index(config)
    return path, _family(config.family, index, config.path), revision


def load_policy(resolved: ResolvedModel, *, dtype: str, device: str | torch.device, parts: str) -> PipelinePolicy:
    """Loads the policy (`parts` as `PipelineFamily.load`); equal arguments give equal bits everywhere. ValueError."""
    folder, family, length = str(folder_of(resolved, parts)), load_family(resolved.family), resolved.max_sequence_length
    how: dict[str, Any] = {"dtype": DTYPES[dtype], "device": torch.device(device), "parts": parts}
    quantizer = Quantizer(resolved.quantize, resolved.quantize_text_encoder, partial(weights_of, resolved))
    if resolved.random:
        from async_flowrl.policies.random_weights import random_policy

        how |= {"longest": length, "quantizer": quantizer}
        policy = random_policy(family, folder, **how)
    else:
        policy = family.load(folder, max_sequence_length=length, **how, **quantizer.options)
    if resolved.attention_backend is not None:
        use_attention(policy.transformer, resolved.attention_backend)
    return policy


def weights_of(model: ResolvedModel) -> Weights:
    """Returns the transformer's tensors by name, each of which is read from its file, or drawn, at each access.

    With `model.quantize` they are the codes and scales that this node keeps. Raises ValueError as `quantizer.kept`.
    """
    dtype, family = DTYPES[model.dtype], load_family(model.family)
    if model.random:
        from async_flowrl.policies.random_weights import random_weights

        folder = str(folder_of(model, "structure"))
        drawn = random_weights(family, folder, dtype)
        if model.quantize is None:
            return drawn
        return QuantizedWeights(drawn, family.structure(folder, dtype), model.quantize, dtype)
    in_float32 = family.float32_parts()
    folders = network_folders(model.path, model.revision)
    stored = StoredWeights(model.path, dtype=dtype, revision=model.revision, folders=folders, in_float32=in_float32)
    if model.quantize is None:
        return stored
    network = family.structure(model.path, dtype, model.revision)
    files = sorted(set(stored.sources.values())) if model.revision is None else []
    made_of = [model.path, model.revision, file_states(files)]
    folder = str(kept_base(QuantizedWeights(stored, network, model.quantize, dtype), made_of))
    return KeptWeights(folder, dtype=dtype, in_float32=in_float32)


def keep_copy(model: ResolvedModel, parts: str) -> None:
    """Makes what this node keeps of the parts (as in `load_policy`) unless it is there; raises as `weights_of`."""
    with ONE_AT_A_TIME:
        if model.quantize is not None:
            weights_of(model)
        if model.quantize_text_encoder is not None and parts == "all":
            load_policy(model, dtype=model.dtype, device="cpu", parts="text")


def folder_of(resolved: ResolvedModel, parts: str) -> Path:
    """Returns the local folder with the files for `parts`; a hub model is downloaded if necessary."""
    if resolved.published is not None:
        return Path(_published(resolved.published)[0])
    if resolved.revision is None:
        return Path(resolved.path)
    return download(resolved.path, resolved.revision, parts)


def shapes_of(model: ResolvedModel, resolution: Resolution, images: int = 0) -> Shapes:
    """Returns the shapes of latents and conditioning, from the model's configuration files. Raises ValueError.

    `images` is the most that a prompt brings to be edited.
    """
    options: dict[str, Any] = {"revision": model.revision, "max_sequence_length": model.max_sequence_length}
    if images:
        options["images"] = images
    return load_family(model.family).shapes(model.path, resolution, **options)


def check_prompts_of(model: ResolvedModel, prompts: Iterable[Prompt]) -> None:
    """Raises ValueError, one sentence, for prompts with a system prompt or token ids that the model cannot encode."""
    special = (p for p in prompts if p.system is not None or p.token_ids or p.negative_token_ids)
    while batch := list(islice(special, PROMPTS_AT_A_TIME)):
        load_family(model.family).check_prompts(batch, model.path, revision=model.revision)


def check_images_of(family: PipelineFamily, prompt: Prompt) -> None:
    """Raises ValueError, one sentence, for a prompt with images that the model cannot edit, or without any.

    Also for texts with a mark that its text encoder takes for an image.
    """
    family.policy.check_images(len(prompt.images))
    family.policy.check_marks(prompt.text, prompt.system, negative=prompt.negative)


def check_revision(recorded: Mapping[str, Any], model: ResolvedModel, where: str) -> None:
    """Raises ValueError if the hub revision in `recorded["model"]`, read from `where`, is not that of `model`."""
    before = recorded.get("model", {}).get("revision")
    if before is not None and before != model.revision:
        raise ValueError(
            f"{where} was trained on revision {before} of {model.path}, this run has {model.revision}: set "
            f"model.revision={before}"
        )


def load_family(name: str) -> PipelineFamily:
    """Returns the family for a registered name or `pkg.module:attr`. Raises ValueError if it cannot be imported."""
    path = FAMILIES.get(name, name)
    family = import_named("model.family", path)
    try:
        built = family()
    except Exception as error:
        raise ValueError(f"model.family {path} cannot be built: {in_one_line(error)}") from error
    policy = getattr(built, "policy", None)
    if not (isinstance(built, PipelineFamily) and isinstance(policy, type) and issubclass(policy, PipelinePolicy)):
        raise ValueError(
            f"model.family {path} must be a class derived from PipelineFamily, and its policy one from PipelinePolicy"
        )
    if Version(installed := diffusers_version()) < Version(built.since):
        raise ValueError(f"model.family {name} needs diffusers {built.since} or newer, installed is {installed}")
    return built


@cache
def diffusers_version() -> str:
    return importlib.metadata.version("diffusers")


def family_of(pipeline: Any, family: str = "auto") -> PipelineFamily:
    """Returns the family of a loaded diffusers pipeline, by its class if `family` is auto. Raises ValueError."""
    name = type(pipeline).__name__
    if family == "auto" and name not in PIPELINES:
        raise ValueError(_no_family("the pipeline", name))
    return load_family(PIPELINES[name] if family == "auto" else family)


def load_pipeline(resolved: ResolvedModel, *, dtype: str, device: str | torch.device) -> Any:
    """Loads the diffusers pipeline itself, for tools that sample with it. Raises ValueError for random weights."""
    if resolved.random:
        raise ValueError("model.weights=random: random weights make no images to look at; set model.weights=files")
    import diffusers

    from async_flowrl.policies.pipeline_family import load_whole, quiet, weight_options

    family = load_family(resolved.family)
    if not hasattr(diffusers, family.pipeline):
        raise ValueError(
            f"diffusers has no {family.pipeline}, so nothing can sample with model.family {resolved.family}"
        )
    with quiet():
        options = weight_options(DTYPES[dtype], resolved.revision)
        options |= family.own_parts(resolved.path, resolved.revision)
        # `model.family` may name another pipeline than the files do.
        return load_whole(getattr(diffusers, family.pipeline), resolved.path, torch.device(device), **options)


def _family(configured: str, file: Path, path: str) -> str:
    index = json.loads(file.read_text(encoding="utf-8"))
    if configured == "auto":
        name = str(index.get("_class_name"))
        if name not in PIPELINES:
            raise ValueError(_no_family(f"the pipeline of model.path {path}", name))
        if levels := index.get("sample_sigmas"):
            raise ValueError(
                f"model.path {path} is sampled at {len(levels)} noise levels of its own (sample_sigmas of "
                "model_index.json), and runs take those of num_inference_steps: give a model without them"
            )
        load_family(PIPELINES[name])
        return PIPELINES[name]
    library, network = index.get("transformer") or (None, None)
    expected = getattr(load_family(configured), "transformer", None)
    if library == "diffusers" and expected and network != expected:
        raise ValueError(
            f"model.family={configured} is for {expected}, and the network of model.path {path} is {network}: leave "
            "model.family out for the family of its pipeline"
        )
    return configured


def _no_family(where: str, name: str) -> str:
    hint = did_you_mean(name, PIPELINES, mistyped=True)
    return (
        f"{where} has no model family yet: there are those of {', '.join(PIPELINES)}, and docs/extending/model.md says "
        f"how to add one, got {name!r}{hint}"
    )


def _hub_index(config: ModelConfig) -> tuple[Path, str]:
    try:
        index = hub_file(config.path, "model_index.json", config.revision)
    except LocalEntryNotFoundError as error:
        reason = "no such folder; as a hub model it is not in the local cache, and the hub cannot be reached"
        raise ValueError(not_found(config.path, reason)) from error
    except (HfHubHTTPError, OSError) as error:
        reason = f"no such folder, and the hub says: {first_line(error)}"
        raise ValueError(not_found(config.path, reason)) from error
    return index, index.parent.name


# Name of a dtype in safetensors headers → `model.dtype`, for the two dtypes that are supported.
_STORED = {"F32": "float32", "BF16": "bfloat16"}
# Bits per element, by the name of the dtype in safetensors headers; 8 for all others.
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "F4": 4}


def dtype_of_files(path: str, revision: str | None) -> str:
    """Returns `float32` or `bfloat16`, in which most bytes of the transformer's files are stored (`model.dtype=auto`).

    Only headers of safetensors files are read, for a hub model also over the network; `revision` is None for a local
    folder. Raises ValueError, one sentence, if most bytes have another dtype, and if no header can be read.
    """
    try:
        files = weights_files(Path(path) / FOLDER) if revision is None else []
        sizes = sum(map(_header, files), Counter()) if revision is None else _hub(path, revision)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"model.dtype=auto cannot be read off the transformer's files of model.path {path}: {first_line(error)}; "
            "set model.dtype to bfloat16 or float32"
        ) from error
    stored, size = sizes.most_common(1)[0]
    if stored not in _STORED:
        share = size / sizes.total()
        raise ValueError(
            f"the transformer's files of model.path {path} hold {stored} ({share:.0%} of their bytes), which nothing "
            "is computed in here: set model.dtype to bfloat16 or float32, into which they are then cast"
        )
    return _STORED[stored]


def _bits(tensors: Iterable[tuple[str, Sequence[int]]]) -> Counter[str]:
    bits: Counter[str] = Counter()
    for dtype, shape in tensors:
        bits[dtype] += math.prod(shape) * _BITS.get(dtype, 8)
    return bits


def _header(file: Path) -> Counter[str]:
    with safe_open(file, "pt") as opened:
        slices = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118
        return _bits((tensor.get_dtype(), tensor.get_shape()) for tensor in slices)


def _hub(path: str, revision: str) -> Counter[str]:
    try:
        names = indexed(hub_file(path, f"{FOLDER}/{FILE}.index.json", revision))
    except EntryNotFoundError:
        names = {FILE}
    total: Counter[str] = Counter()
    for name in sorted(f"{FOLDER}/{name}" for name in names):
        cached = try_to_load_from_cache(path, name, revision=revision)
        total += _header(Path(cached)) if isinstance(cached, str) else _remote(path, name, revision)
    return total


def _remote(path: str, name: str, revision: str) -> Counter[str]:
    if not hub_answers():
        raise OSError(f"{name} is not in the local cache, and the hub cannot be reached")
    # Its base classes include the HTTP library's error, which comes unwrapped if the hub does not answer.
    errors = (*HfHubHTTPError.__bases__, EntryNotFoundError, SafetensorsParsingError)
    try:
        header = parse_safetensors_file_metadata(path, name, revision=revision)
    except cast("tuple[type[Exception], ...]", errors) as error:
        raise OSError(f"{name}: {first_line(error)}") from error
    return _bits((tensor.dtype, tensor.shape) for tensor in header.tensors.values())


class PromptCheck:
    """Check of prompts that counts in `cut` those of which the model's text encoder reads only a part."""

    def __init__(self, model: ResolvedModel, *, targets: bool = True) -> None:
        """`targets`: whether rewards look at targets, which then have to be in the part that is read."""
        self._model, self._family, self._targets = model, load_family(model.family), targets
        self.cut = 0

    def __call__(self, prompt: Prompt) -> None:
        """Raises ValueError for a prompt whose target stands in its text, but only in the part that is not read.

        Also as `check_images_of`, and for a prompt with images that the model cannot read as a whole.
        """
        check_images_of(self._family, prompt)
        if prompt.images:
            path, folder, revision = self._model.path, self._family.tokenizer, self._model.revision
            tokenizer = None if self._model.random else _tokenizer(path, folder, revision)
            self._family.check_length(prompt, tokenizer, self._token_side)
        if (read := self.read(prompt)) is None:
            return
        self.cut += 1
        if self._targets and prompt.target and prompt.target in prompt.text and prompt.target not in prompt.text[:read]:
            raise ValueError(
                f"the prompt {prompt.text[:40]!r}… is longer than the text encoder reads: it is cut after {read} "
                f"characters, and its target {prompt.target!r} comes later; shorten the prompt, or raise "
                "model.max_sequence_length"
            )

    @cached_property
    def _token_side(self) -> int:
        return self._family.token_side(self._model.path, self._model.revision)

    def read(self, prompt: Prompt) -> int | None:
        """Returns the number of the prompt's characters that are read; None if that is all of them, or not known."""
        if self._model.random or not isinstance(prompt.wording, str):
            return None
        limit = self._model.max_sequence_length or self._family.text_tokens
        if len(prompt.text.encode()) < limit - MARGIN:
            return None
        tokenizer = _tokenizer(self._model.path, self._family.tokenizer, self._model.revision)
        if tokenizer is None or not tokenizer.is_fast:  # Only a fast one says where its tokens stand.
            return None
        text, start, kept = self._family.framed(tokenizer, prompt.text, limit)
        places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if len(places) <= kept or (read := places[kept - 1][1] - start) >= len(prompt.text.rstrip()):
            return None
        return max(0, int(read))


@cache
def _tokenizer(path: str, folder: str, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, subfolder=folder, revision=revision)
    except (OSError, ValueError) as error:
        logger.warning("whether prompts are longer than the text encoder reads is not known: %s", error)
        return None
