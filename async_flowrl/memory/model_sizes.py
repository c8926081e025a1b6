"""Sizes of a model by the headers of its files, and the longest prompts and largest images of a configuration."""

import re
from collections import Counter
from dataclasses import dataclass

from async_flowrl.config.paths import find_data
from async_flowrl.config.resolution import Resolution, at_size, configured, largest, with_frames
from async_flowrl.config.schema import Config, DataConfig
from async_flowrl.data.load import load_data
from async_flowrl.policies.pipeline import USUAL_TOKENS, estimated_tokens
from async_flowrl.policies.quantized_layer import quantized_bytes
from async_flowrl.policies.stored import StoredElements, trained_names
from async_flowrl.policies.tuning import tuning_of

# Beginning of the names of a block's tensors, e.g. `transformer_blocks.7.` or, of an expert, `transformer_2.blocks.7.`.
_BLOCK = re.compile(r"(transformer(_2)?\.)?[^.]+\.\d+\.")


# Share of a text encoder's parameters that counts as outside of its layers, which are quantised: in Gemma 2 2B, SANA's,
# it is 23 %, in the others of the package less.
EMBEDDINGS_SHARE = 0.25
# End of the name of the one kind of tensor in the files that is no parameter: diffusers' tables of positions.
_BUFFER = ".pos_embed"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, of which the adapter is what is trained: a LoRA, or with `full` the trained weights."""

    base_parameters: int  # Parameters of the transformer without its LoRA.
    base_bytes: int  # Bytes of those, as `model.quantize` stores them.
    blocks: int  # Number of the transformer's blocks.
    block_bytes: int  # Bytes of the largest block of the base.
    root_bytes: int  # Bytes of the base that are in no block.
    adapter_parameters: int  # Trained parameters; from the headers of files, those of a LoRA count as 0.
    text_bytes: int  # Bytes of all text encoders.
    vae_parameters: int
    buffer_bytes: int  # Bytes of the transformer's buffers (constant tables), which are never sharded.
    itemsize: int  # Bytes of one number of the network and of a version.
    full: bool

    @property
    def version_bytes(self) -> int:
        """Bytes of one version as it is kept and sent; the trainer's own copy is float32."""
        return self.adapter_parameters * self.itemsize


def stored_sizes(config: Config, stored: StoredElements, itemsize: int) -> Sizes:
    """Returns the sizes by the headers of the model's files; `itemsize` is of the dtype that the run computes in."""
    blocks, full = Counter[str](), tuning_of(config).whole
    buffers = {name for name in stored.transformer if name.endswith(_BUFFER)}
    parameters = {name: elements for name, elements in stored.transformer.items() if name not in buffers}
    for name, elements in parameters.items():
        block = _BLOCK.match(name)
        blocks["" if block is None else block[0]] += elements
    root = blocks.pop("", 0)
    weights = sum(elements for name, elements in parameters.items() if _BLOCK.match(name) and name.endswith(".weight"))
    whole = sum(parameters.values())
    trained = trained_names(parameters, config.full.freeze) if full else []
    return Sizes(
        base_parameters=whole,
        base_bytes=itemsize * (whole - weights) + quantized_bytes(config.model.quantize, weights, itemsize),
        blocks=len(blocks),
        block_bytes=itemsize * max(blocks.values(), default=0),
        root_bytes=itemsize * root,
        adapter_parameters=sum(parameters[name] for name in trained),
        text_bytes=text_bytes(config.model.quantize_text_encoder, stored.text_encoders, itemsize),
        vae_parameters=stored.vae,
        buffer_bytes=itemsize * sum(stored.transformer[name] for name in buffers),
        itemsize=itemsize,
        full=full,
    )


def text_bytes(name: str | None, parameters: int, itemsize: int) -> int:
    """Returns the bytes of text encoders on the device if `model.quantize_text_encoder` is `name`."""
    outside = 0 if name is None else round(EMBEDDINGS_SHARE * parameters)
    return itemsize * outside + quantized_bytes(name, parameters - outside, itemsize)


@dataclass(frozen=True)
class PromptSizes:
    """Of the prompts of a run: their own image sizes, tokens of the longest, and the most images that one edits."""

    sizes: list[Resolution]
    longest: int = USUAL_TOKENS
    images: int = 0


# Settings and state of the prompt files → what `prompt_sizes` returns.
_read: dict[str, PromptSizes] = {}


def at_largest(config: Config) -> Config:
    """Returns the configuration with its largest size for all images. Raises ValueError for an invalid size."""
    # The size is the largest of the settings and of the prompts that bring their own. If a prompt file is not on this
    # machine, only the settings count.
    of_prompts = (with_frames(size, config.rollout.frames) for size in prompt_sizes(config.data).sizes)
    return at_size(config, largest([*configured(config.rollout), *of_prompts]))


def prompt_sizes(how: DataConfig) -> PromptSizes:
    """Returns sizes of the prompts, evaluations included. PromptError if the file of prompts is invalid."""
    try:
        paths = [find_data(name, key="data", folder=True) for name in (how.train, how.evaluation) if name]
    except FileNotFoundError:
        return PromptSizes([])
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    key = f"{how!r} {[(str(file.absolute()), file.stat().st_mtime_ns, file.stat().st_size) for file in files]}"
    if key not in _read:
        data = load_data(how, needs_target=False)
        wordings = (prompt.wording for prompts in (data.train, data.evaluation) for prompt in prompts)
        tokens = max(map(estimated_tokens, wordings), default=USUAL_TOKENS)
        images = max(data.train.most_images, data.evaluation.most_images)
        _read[key] = PromptSizes([*data.train.sizes, *data.evaluation.sizes], tokens, images)
    return _read[key]
