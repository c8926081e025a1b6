"""The section `rollout` of the configuration: the pool that generates images."""

from dataclasses import dataclass, field
from typing import Any

from async_flowrl.config.settings import FREE, NOTHING, ROUNDING, setting


@dataclass
class RolloutConfig:
    """The pool that generates images."""

    num_workers: int = setting(1, at_least=1, changes=NOTHING)
    """Rollout workers, each with a whole model."""
    workers_per_node: int | None = setting(None, at_least=1, changes=NOTHING)
    """Workers on each node, exactly so many on num_workers / workers_per_node nodes; null = wherever there is room."""
    min_workers: int | None = setting(None, at_least=1, changes=NOTHING)
    """Fewest workers with which the run starts; it ends if there are fewer for too long (docs/do/nodes.md). null =
    num_workers."""
    max_workers: int | None = setting(None, at_least=1, changes=NOTHING)
    """Most workers: the pool grows to this number while nodes have room; null = num_workers. If min_workers or
    max_workers is set, the pool also gives up the workers of a node that is drained."""
    gpus_per_worker: float = setting(1.0, at_least=0, changes=NOTHING)
    """GPUs per worker, if the cluster has any; otherwise a custom CPU resource takes their place. vllm_omni spreads the
    network over all GPUs of a worker (tensor parallel), which changes rounding."""
    engine: str = setting("diffusers", choices=("diffusers", "vllm_omni"))
    """diffusers (the reference) or vllm_omni (needs the extra `vllm-omni`; see docs/rollout_engines.md)."""
    batch_size: int | None = setting(None, at_least=1, changes=ROUNDING)
    """Images of a ticket per forward pass: tickets are cut into chunks of this size; null = no cutting."""
    tickets_per_batch: int = setting(1, at_least=1, changes=ROUNDING)
    """Training tickets that one forward pass computes together, always the same ones, with prompts of about one length.
    It helps if single tickets are too small to fill a GPU; the last float bits of an image then depend on its batch."""
    threads: int = setting(1, at_least=1, changes=ROUNDING)
    """Torch threads per worker."""
    compile: bool = setting(False, changes=ROUNDING)
    """Compile each block with torch.compile, in the diffusers engine."""
    text_encoder: str = setting("resident", choices=("resident", "offload", "cached"), changes=NOTHING)
    """Place of a rollout worker's text encoders. resident: on the device. offload: in host memory, and on the device
    only while new prompts are encoded. cached: not in memory; embeddings are files in $ASYNC_FLOWRL_CACHE (or
    ~/.cache/async_flowrl), and the text encoders are loaded for prompts without a file, while the network is not on the
    device."""
    versions_on: str = setting("auto", choices=("auto", "host", "device"), changes=NOTHING)
    """Memory in which a rollout worker keeps the versions that it may need, beside the live weights: host (pinned where
    there is a GPU; activating one is a copy to the GPU), or device. auto: host with tune=full, whose versions are whole
    models, else device. Not host with the transports nccl and pynccl, which write into a GPU's memory."""
    encode_ahead: int = setting(1024, at_least=1, changes=NOTHING)
    """With text_encoder=cached: prompts that all workers together encode before they start; also the number of coming
    prompts that are encoded, too, when the text encoders are loaded for a new one."""
    vae_slicing: bool = setting(False, changes=ROUNDING)
    """Decode one image at a time, which needs less memory."""
    vae_tiling: bool = False
    """Decode large images in overlapping tiles, which needs less memory and changes pixels where tiles are blended. The
    model's VAE decides which images are large (Qwen-Image: sides above 256 pixels, SD3 and FLUX: above 1024)."""
    environment: dict[str, str] = field(default_factory=dict, metadata=FREE)
    """Environment variables of the pool's processes, e.g. {NCCL_SOCKET_IFNAME: eth0}; on the command line
    `+rollout.environment={…}`."""
    resolution: Any = 32
    """Pixels of an image: an integer for both sides of a square, or [height, width]. Sides must be multiples of a
    number that depends on the model; a prompt may have a size of its own (docs/do/sizes.md)."""
    resolutions: list[Any] = field(default_factory=list)
    """Several sizes, each as in resolution, e.g. [512,[448,576],[576,448]]: every group of images draws one from the
    seed, and an evaluation prompt always has the same one. [] = all images have rollout.resolution."""
    num_inference_steps: int = setting(6, at_least=2)
    """Denoising steps of an image that is trained on."""
    true_cfg_scale: float = setting(1.0, at_least=0)
    """Scale of classifier-free guidance with a negative prompt, above 1, which doubles the cost; 1 or 0 = off."""
    guidance_scale: float = setting(0.0, at_least=0)
    """Guidance scale that distilled models (FLUX) take as a network input; 0 for models without this input."""
    negative_prompt: str = " "
    """Negative prompt of classifier-free guidance, for prompts that have none of their own."""
