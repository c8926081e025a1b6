"""The configuration: a tree of dataclasses, registered with Hydra as `schema`.

The text under a field says what it means, with its unit; `setting` adds the values that it takes and what changing it
does. docs/write_configuration.py copies all of it to docs/configuration.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from async_flowrl.config.models import TINY, model_defaults
from async_flowrl.config.settings import FREE, MAX_SEED, NOTHING, ROUNDING, setting

if TYPE_CHECKING:  # null where it is not given, and a number in every Config (config/models.py)
    DefaultInt: TypeAlias = int
    DefaultFloat: TypeAlias = float
else:
    DefaultInt, DefaultFloat = int | None, float | None
# Largest `trainer.micro_batch_size` that is a default.
MICRO_BATCH = 16
LORA, FULL = "lora", "full"
# Value of `placement`, and name of the pool in which each worker then samples and trains.
SHARED = "shared"


@dataclass
class LoraConfig:
    """The LoRA that tune=lora trains, the base model frozen. With tune=full it has no effect, and path must be null."""

    rank: DefaultInt = setting(None, at_least=1)
    """Inner dimension of the LoRA's two matrices; a larger one can express more, and more bytes are kept and sent
    (docs/planning.md). null = the model family's."""
    alpha: DefaultFloat = setting(None, above=0)
    """Scale of the LoRA: the product of its matrices is multiplied by alpha / rank. null = twice the rank."""
    targets: list[str] | None = None
    """Ends of the names of the layers that get a LoRA, e.g. [attn.to_q]; null takes the family's default list."""
    path: str | None = None
    """Diffusers or PEFT LoRA of this rank from which the run starts; it is then also the reference of the KL penalty.
    null starts with the base model."""


@dataclass
class FullConfig:
    """Settings of tune=full, which trains every parameter of the transformer, with optimizer and weights in float32."""

    freeze: list[str] = field(default_factory=list)
    """Patterns of names of parameters that are not trained; * stands for anything: ['pos_embed.*','*.norm*']. [] = all
    parameters are trained."""


@dataclass
class TinyConfig:
    """The tiny model with random weights that `model.path=tiny` builds."""

    family: str = "qwen_image"
    """qwen_image, qwen_image_21, sd3, flux, z_image or sana, or `pkg.module:attr` or `file.py:attr` of your own."""
    layers: int = setting(2, at_least=1)
    """Transformer blocks, of each kind that the family has."""
    heads: int = setting(8, at_least=1)
    """Attention heads of 16 channels each."""
    contrast: float = setting(3.0, above=0)
    """Factor on the VAE's last convolution; it raises the contrast of images, which a random VAE makes nearly grey."""
    seed: int = setting(0, at_least=0, at_most=MAX_SEED)
    """Seed of the random weights."""


@dataclass
class ModelConfig:
    """The base model: the same for rollout and trainer."""

    path: str = "tiny"
    """`tiny` (built offline and kept in $ASYNC_FLOWRL_CACHE, or ~/.cache/async_flowrl), a local diffusers folder, or a
    hub name such as Qwen/Qwen-Image."""
    revision: str | None = None
    """Revision on the hub; null takes the newest one, and the run records its commit."""
    weights: str = setting("files", choices=("files", "random"))
    """files, or random: drawn from seeds on the device, for speed and memory without a download (docs/start/gpu.md)."""
    family: str = setting("auto", changes=NOTHING)
    """Name in the policies registry, or `pkg.module:attr` or `file.py:attr` of your own; auto: of model_index.json."""
    dtype: str = setting("auto", choices=("auto", "float32", "bfloat16"))
    """Dtype in which the network computes; auto: that of the transformer's files. Latents, noise levels: float32."""
    quantize: str | None = setting(None, choices=("int8", "fp8", "int4", "nf4"))
    """Blocks of the frozen base are stored in 8 bits a weight, or in 4.25; null: in `dtype` (docs/do/quantize.md)."""
    quantize_text_encoder: str | None = setting(None, choices=("int8", "fp8", "int4", "nf4"))
    """The same for the text encoders."""
    max_sequence_length: int | None = setting(None, at_least=1)
    """Text tokens to which prompts are padded or cut, if the family does; null = the diffusers pipeline's default."""
    attention_backend: str | None = setting(None, changes=ROUNDING)
    """Attention backend of diffusers, e.g. flash or _native_cudnn; null = torch's own choice of kernel."""
    tiny: TinyConfig = field(default_factory=TinyConfig)


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
    """Images of a ticket per forward pass: tickets are cut into chunks; null = no cutting (Qwen-Image-Edit: 8)."""
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
    resolution: Any = None
    """Pixels of an image: an integer for both sides of a square, or [height, width], or of a video [frames, height,
    width]. Sides must be multiples of a number that depends on the model; a prompt may have a size of its own
    (docs/do/sizes.md). null = the model family's."""
    resolutions: list[Any] = field(default_factory=list)
    """Several sizes, each as in resolution, e.g. [512,[448,576],[576,448]]: every group of images draws one from the
    seed, and an evaluation prompt always has the same one. [] = all images have rollout.resolution."""
    frames: int | None = setting(None, at_least=1)
    """Frames of a video, for models that make videos, in place of those in resolution; the model allows certain numbers
    (Wan: 1, 5, 9, …). A prompt may have a number of its own (docs/do/sizes.md). null = as in resolution."""
    num_inference_steps: DefaultInt = setting(None, at_least=2)
    """Denoising steps of an image that is trained on. null = the model family's."""
    true_cfg_scale: DefaultFloat = setting(None, at_least=0)
    """Scale of classifier-free guidance with a negative prompt, at twice the cost; 1 or 0: off. null = the family's."""
    true_cfg_scale_2: float | None = setting(None, at_least=0)
    """true_cfg_scale of the second expert (Wan 2.2), which makes the low noise levels; null = the same."""
    guidance_scale: DefaultFloat = setting(None, at_least=0)
    """Guidance scale that distilled models (FLUX) take as an input; 0 for models without it. null = the family's."""
    negative_prompt: str = " "
    """Negative prompt of classifier-free guidance, for prompts that have none of their own."""

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change during a run."""
        return self.min_workers is not None or self.max_workers is not None

    @property
    def worker_bounds(self) -> tuple[int, int]:
        return (
            self.num_workers if self.min_workers is None else self.min_workers,
            self.num_workers if self.max_workers is None else self.max_workers,
        )


SDE_TYPES = ("sde", "dance_sde", "cps", "ode")


@dataclass
class AlgorithmConfig:
    """The loss that is trained, and which denoising steps are noisy and trained."""

    name: str = "flow_grpo"
    """Name of a built-in algorithm, or `pkg.module:attr` or `file.py:attr` of your own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for an algorithm of your own; the built-in ones use the fields below."""
    final_images: bool = False
    """true for an algorithm of your own that trains on final images, as diffusion_nft does; denoising steps then add no
    noise."""
    sde_type: str = setting("sde", choices=SDE_TYPES)
    """Kind of noise in noisy denoising steps: sde (Flow-GRPO), dance_sde (DanceGRPO), cps (coefficients-preserving), or
    ode for no noise, which only algorithms on final images allow."""
    noise_level: float = setting(1.0, at_least=0)
    """Factor on the noise of a denoising step; for cps at most 1."""
    window: str = setting("none", choices=("none", "random", "sliding", "list", "fraction"))
    """Choice of the denoising steps that add noise and are trained. none: all but the last one. random, sliding:
    adjacent steps. list: steps of window_list. fraction: all but the last add noise, and a random share is trained."""
    sde_window_size: int | None = setting(None, at_least=1)
    """Denoising steps in the window. random and sliding need it; with list, null means all of window_list."""
    sde_window_range: tuple[int, int] | None = setting(None, pair=True)
    """Half-open range of denoising steps, by index, that may get noise; null = all but the last one, which never gets
    any, so that a range ends before it where there are fewer steps."""
    window_per: str = setting("group", choices=("group", "step"))
    """group: each group draws its own window, or noise levels. step: all groups of a training step share them."""
    window_interval: int = setting(25, at_least=1)
    """Training steps before a sliding window moves by one denoising step."""
    window_decay: str = setting("none", choices=("none", "linear", "exponential"))
    """Decay of window_interval for later positions of a sliding window (MixGRPO's variants); none keeps it constant."""
    window_interval_min: int = setting(1, at_least=1)
    """Training steps to which window_decay=linear reduces window_interval at the last step that may be noisy."""
    window_decay_start: int = 13
    """Denoising steps, by index, up to which window_decay=exponential keeps the whole window_interval."""
    window_decay_rate: float = setting(0.1, at_least=0)
    """Decay rate per denoising step after window_decay_start, with window_decay=exponential."""
    window_list: list[int] | None = None
    """Denoising steps, by index, from which window=list takes the noisy and trained ones."""
    timestep_fraction: float = setting(1.0, above=0, at_most=1)
    """Share of the noisy steps (with window=fraction) or of the noise levels (algorithms on final images) that is
    trained, drawn at random; 1 = all."""
    timestep_range: tuple[int, int] | None = setting(None, pair=True)
    """For algorithms on final images: half-open range of noise levels, by index from the noisiest, at which images may
    be trained; null = all levels, at which a range ends, too. timestep_fraction is a share of this range."""
    timestep_stratified: bool = False
    """For algorithms on final images: cut the range into as many parts as levels are trained, and draw one of each."""
    same_initial_noise: bool = False
    """true: all images of a group start from the same noise (DanceGRPO) and differ only by the noise of later steps."""
    clip_range: float = setting(1e-4, above=0)
    """Bound of the probability ratio: how far it may leave 1 before its gradient is cut; for flow_dppo, the divergence
    at which a row is dropped. It has an effect from the second optimizer step of a batch on."""
    clip_unit: str = setting("mean", choices=("mean", "nats"))
    """mean: clip_range bounds the ratio of log-probs per latent element, as in published recipes. nats: it bounds the
    log-ratio of whole latents, so the same value suits any resolution."""
    step_weight: str = setting("none", choices=("none", "variance", "relative_variance", "relative_std", "rectified"))
    """variance: weight the loss of each denoising step by the variance of its noise. none: the last noisy steps, whose
    densities are the sharpest, dominate the gradient although they say least about the image. relative_variance,
    relative_std (TempFlow-GRPO), rectified (Flash-GRPO): variance, standard deviation, or standard deviation ÷ |d mean
    / d velocity|, divided by its mean over all steps that may be trained."""
    max_kl_per_update: float | None = setting(None, above=0)
    """Nats per image, summed over the denoising steps, by which one optimizer step may move the policy (exact Gaussian
    KL, measured after the step). A longer step is scaled down. null = no limit; then every tenth step is measured."""
    kl_probe_images: int = setting(2, at_least=0)
    """Images of the lowest trained group (at most a micro-batch) on which this KL is measured, by two forward passes
    at every denoising step; 0 = not measured."""
    kl_coef: float = setting(0.0, at_least=0)
    """Coefficient of the KL penalty; 0 = none. Above 0, each batch needs a forward pass of the reference model."""
    reference_every: int | None = setting(None, at_least=1)
    """Training steps after which the trained weights become the reference, again and again; null = it stays the model
    before training."""
    kl_form: str = setting("code", choices=("code", "exact", "proximal"))
    """exact: the Gaussian KL to the reference, per latent element. code: the same times the step size (for cps equal to
    exact), as published coefficients assume. proximal: half the squared log-ratio to the weights at the start of the
    batch (MixGRPO), which needs no reference."""
    adv_clip_max: float = setting(5.0, above=0, infinite=True)
    """Advantages are clamped to plus or minus this value: standard deviations of the reward, or with normalise=none
    its own unit. flow_dppo does not clamp."""
    adv_clip: str = setting("hard", choices=("hard", "tanh"))
    """hard: advantages are clamped. tanh: A becomes adv_clip_max · tanh(A / adv_clip_max), which keeps all of them
    apart (V-GRPO)."""
    global_std: bool = False
    """Divide by the reward std of the whole batch instead of each group's. Needs hand_over=batch."""
    normalise: str = setting("std", choices=("std", "none"))
    """std: divide by the reward std. none: only subtract the mean (Dr.GRPO)."""
    zero_std_groups: str = setting("count", choices=("count", "drop"))
    """Groups whose images all have the same reward. count: they count in the mean over the rows of a step. drop: they
    are not trained at all, by their KL or teacher neither, and the mean is over the rows that are (flow_grpo's code);
    not with policy_coef=0."""
    train_images_per_group: int | None = setting(None, at_least=2)
    """Images of each group that train, half of them those with the highest advantages, half those with the lowest
    (DanceGRPO's bestofn); advantages are those of the whole group. null = all."""
    combine: str = setting("sum", choices=("sum", "per_reward", "gdpo"))
    """With several rewards: sum adds the weighted rewards, then normalises; per_reward normalises each, then adds them
    with their weights; gdpo then whitens the sums over the batch, which needs hand_over=batch."""
    correction: str | None = setting(None, choices=("none", "mask", "tis", "rollout_tis"))
    """Correction for images of older weights. none: nothing. mask: drops rows that moved too far from these weights.
    tis: truncated importance weights with respect to these weights. rollout_tis: the same with respect to the log-probs
    that the rollout recorded, which also corrects differences between the engines. null = none for max_staleness of at
    most 1, mask above."""
    correction_threshold: float | None = setting(None, above=0)
    """Nats per denoising step, for correction=mask: a row with at least this divergence from the behaviour policy is
    dropped if it would move further away. null = twice the mean step of the farthest policy that max_staleness updates
    of max_kl_per_update nats reach (of 0.3 nats per 1,024 latent numbers if that is null)."""
    tis_cap: float = setting(2.0, above=0)
    """Largest importance weight of tis and rollout_tis; larger ones are cut to it."""
    beta: float = setting(1.0, above=0)
    """For diffusion_nft the mixing coefficient, for dpo and dgpo the inverse temperature, for crd the factor on the
    implicit reward."""
    advantage_mode: str = setting(
        "continuous", choices=("continuous", "positive_only", "negative_only", "one_only", "binary")
    )
    """For diffusion_nft: advantages as they are (continuous), only those of one sign, 1 for those above 0 and 0 for
    others (one_only), or only their signs (binary)."""
    old_policy_decay: str = setting("copy", choices=("copy", "half", "slow", "quick", "late", "rising"))
    """For diffusion_nft and crd: share of the sampling policy that stays at the end of a batch, after n optimizer steps
    in all: copy (0), half (.5), slow (min(.001 n, .5)), quick (min(.001 n, .3)), late (0 below 75, then
    min(.0075 (n - 75), .999)) or rising (min(.25 + .005 n, .999))."""
    error_weight: str = setting("uniform", choices=("uniform", "sigma", "sigma_squared", "huber", "ghuber"))
    """For awm: how the error e at noise level s becomes a negative log-prob: e, e s, e s², the square root of e times s
    (huber), or 4 times the fourth root of e times s (ghuber)."""
    average_decay: str | None = setting(None, choices=("copy", "half", "slow", "quick", "late", "rising"))
    """Moving average of the trained weights with which a loss compares, by the schedules of old_policy_decay; null = no
    average. It changes at the end of a batch and samples nothing."""
    average_coef: float = setting(0.0, at_least=0)
    """Coefficient of the squared distance between the trained weights' velocity and the moving average's; it needs
    average_decay, and above 0 a forward pass of the average."""
    anchor: str = setting("reference", choices=("reference", "average"))
    """For dgpo and crd: weights whose error is the baseline of an image, the reference's or the moving average's."""
    reference_cfg_scale: float | None = setting(None, at_least=0)
    """Scale of classifier-free guidance of the reference, for algorithms on final images; null = as the images.
    With crd it needs anchor=average."""
    teachers: dict[str, str] = field(default_factory=dict)
    """Label → LoRA file or folder that teaches the prompts with this label in their column `teacher`; a single one
    also teaches prompts without a label. For tune=lora; the rank is at most lora.rank, the layers are those of
    lora.targets."""
    teacher_coef: float = setting(0.0, at_least=0)
    """Coefficient of the distance to the teacher: the KL per trained step (exact, per latent element), for algorithms
    on final images the squared distance of velocities. Above 0 it costs a forward pass of the teacher."""
    policy_coef: float = setting(1.0, at_least=0)
    """Factor on the loss from rewards, beside a teacher; 0 = the teacher alone."""
    negate_reward: bool = False
    """For tests: train against the reward."""
    permute_advantages: bool = False
    """For tests: shuffle the advantages inside each group."""


@dataclass
class ServeConfig:
    """A server for this reward term, which the run starts, watches and stops."""

    command: Any = None
    """Program and arguments as a text or a list of texts; no shell interprets it. The run replaces {port}, {host} and
    {token_file}. A server with packages of its own begins with `uv run --isolated --no-project --with PACKAGE`."""
    gpus: float = setting(0.0, at_least=0, changes=NOTHING)
    """GPUs of each server, which sees no others; a custom CPU resource takes their place if the cluster has none."""
    replicas: int = setting(1, at_least=1, changes=NOTHING)
    """Servers that the run starts; groups are spread over them."""
    health: str = setting("/health", changes=NOTHING)
    """HTTP path that answers 200 as soon as the server can score."""
    port: int | None = setting(None, at_least=1, at_most=65535, changes=NOTHING)
    """TCP port of the first replica; further replicas take the next ports. null = any free port."""
    start_seconds: float = setting(900.0, above=0, changes=NOTHING)
    """Seconds from the start of a server until it must be healthy; `uv run` installs its packages in this time."""
    restarts: int = setting(3, at_least=0, changes=NOTHING)
    """Restarts of each replica that died or hung. After them it is lost. That ends the run; for a held-out term or one
    with required: false, the other replicas go on, and after the last one the term has no scores."""
    hung_seconds: float = setting(120.0, above=0, infinite=True, changes=NOTHING)
    """Seconds without a 200 from its health path after which a server that was up counts as hung and is restarted. A
    server that cannot answer while it scores needs more than the time of its longest request, or .inf."""
    environment: dict[str, str] = field(default_factory=dict, metadata=FREE)
    """Environment variables of the server; the run replaces {token} in them by the token that its requests carry."""


@dataclass
class RewardTerm:
    """One reward of the sum."""

    weight: float = 1.0
    """Factor on this reward in the sum; a negative one trains against it."""
    name: str | None = None
    """Registered name, `pkg.module:attr` or `file.py:attr`; null = the key under `reward.terms`; with `serve` http."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward, e.g. {model: …}; each reward has its own."""
    required: bool = True
    """true: if this term cannot score a group after the retries, reward.on_error decides. false: such a group is
    trained on the sum of its other terms; it is counted and shown, and its scores are stored, so that a resumed run
    has the same."""
    workers: int | None = setting(None, at_least=1, changes=NOTHING)
    """Workers of a pool that scores only this term. A term has its own pool if this setting or one of the next two is
    set; the others are then as in reward.*. All null = the shared pool scores the term."""
    gpus_per_worker: float | None = setting(None, at_least=0, changes=NOTHING)
    """GPUs per worker of the term's own pool; see reward.gpus_per_worker."""
    threads: int | None = setting(None, at_least=1, changes=NOTHING)
    """Torch threads per worker of the term's own pool."""
    serve: ServeConfig | None = None
    """A server that the run starts for this term; null = no server."""


@dataclass
class RewardConfig:
    """The pool that scores images, and the terms of the reward."""

    num_workers: int = setting(1, at_least=1, changes=NOTHING)
    """Reward workers; each scores one group at a time, with all terms that have no pool of their own."""
    gpus_per_worker: float = setting(0.0, at_least=0, changes=NOTHING)
    """GPUs per worker; a fraction such as 0.25 lets four workers share one. A worker with 0 sees no GPU. If the cluster
    has none, a custom CPU resource takes their place. With runtime.backend=local, workers are threads and see all GPUs
    of this process."""
    threads: int = setting(1, at_least=1, changes=NOTHING)
    """Torch threads per worker."""
    environment: dict[str, str] = field(default_factory=dict, metadata=FREE)
    """Environment variables of the pool's processes."""
    terms: dict[str, RewardTerm] = field(default_factory=dict)
    """Name → term; the reward is the weighted sum."""
    on_error: str = setting("fail", choices=("fail", "skip"))
    """If a score is missing after the retries: fail ends the run; skip leaves out the group, which is counted and
    shown. An evaluation does not end the run: missing scores are named, and the exit code is 3."""
    retries: int = setting(3, at_least=0, changes=NOTHING)
    """Retries of a failed term, on the next free worker of its pool; of a pointwise term, image by image."""
    backoff: float = setting(0.5, at_least=0, changes=NOTHING)
    """Seconds before the first retry; doubled each time."""
    concurrency: int = setting(8, at_least=1, changes=NOTHING)
    """Images of a group that a worker scores at the same time with a term that takes one image per call (pointwise). If
    the term fails for an image, only this image is tried again, in the same worker and within deadlines.score."""
    frames: int | None = setting(None, at_least=1)
    """Frames of a video that rewards of images score, evenly spaced from the first to the last; null = all of them."""
    frame_score: str = setting("mean", choices=("mean", "min", "first"))
    """A video's score, and each number beside it, from those of its frames: their mean, the least, or the first."""


@dataclass
class CurriculumConfig:
    """Sets prompts aside for a while if all images of a group get the same reward, because they teach nothing."""

    after: int | None = setting(None, at_least=1)
    """Groups of images in succession, of one prompt and without any spread of rewards, after which the prompt is set
    aside; null = never. Only groups of steps more than max_staleness steps ago count; these are certainly trained."""
    skip_epochs: int = setting(1, at_least=1)
    """Passes over the prompts without one set aside. Then it comes at least once, and stays if its rewards differ."""


@dataclass
class DataConfig:
    """The prompts."""

    train: str = "prompts/two_prompts.txt"
    """Training prompts: a txt, jsonl or parquet file, or a folder with a train split (see docs/data.md). Relative paths
    are searched in the working directory, then among the files of this package."""
    evaluation: str | None = setting(None, changes=NOTHING)
    """Evaluation prompts: a file as in data.train, or a folder with a test split. null = as data.held_out says; then
    the held-out prompts are not trained. A resumed run must have the same training prompts."""
    prompt_key: str = "prompt"
    """Column of a jsonl or parquet file that holds the prompt."""
    weight_key: str | None = None
    """Column with a weight of at least 0: on average a prompt is drawn in proportion to its weight, in each epoch that
    number rounded up or down. An epoch has as many draws as there are prompts. null = each prompt once per epoch."""
    images: bool = True
    """true: the columns image and images hold images to edit (see docs/do/edit.md). false: image and images are columns
    like others."""
    held_out: float | None = setting(None, at_least=0, below=1)
    """Share of the prompts of data.train that are evaluated instead of trained; equal texts stay together. null = if
    data.evaluation=null and there are at least 64 different prompts, 16 of them, but at most an eighth; 0 = none."""
    held_out_seed: int = setting(0, at_least=0, at_most=MAX_SEED)
    """Seed that selects the held-out prompts."""
    shuffle: bool = True
    """true: a new order of the prompts in every epoch, drawn from the seed. false: the order of the file."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


@dataclass
class TrainerConfig:
    """The pool that trains."""

    num_workers: int = setting(1, at_least=1, changes=NOTHING)
    """Trainer ranks; they share the groups of a step. The trained weights do not depend on their number, except with
    tune=full and shard=full."""
    workers_per_node: int | None = setting(None, at_least=1, changes=NOTHING)
    """Ranks on each node: exactly this many, in order, on num_workers / workers_per_node nodes; null = on as few
    nodes as possible."""
    gpus_per_worker: float = setting(1.0, at_least=0, changes=NOTHING)
    """GPUs per rank, if the cluster has any; 0 trains on the CPU."""
    threads: int = setting(1, at_least=1, changes=ROUNDING)
    """Torch threads per rank."""
    environment: dict[str, str] = field(default_factory=dict, metadata=FREE)
    """Environment variables of the pool's processes, e.g. {NCCL_DEBUG: WARN, PYTORCH_CUDA_ALLOC_CONF: …}."""
    shard: str = setting("auto", choices=("auto", "none", "full", "hybrid"), changes=NOTHING)
    """How several ranks hold the frozen base, with tune=full the trained weights and their optimizer. full: each holds
    a share (FSDP2), and blocks are gathered one by one; with tune=full the ranks add up their gradients as floats, so
    the weights depend on num_workers then (docs/guarantees.md). none: each holds all of it, so nothing is gathered.
    hybrid, not with tune=full: each set of shard_size ranks holds it once. auto: none on CPUs, with placement=shared,
    and if the planned memory of a trainer rank, activations included, takes at most 90 % of its GPU; otherwise hybrid
    over the ranks of a node if workers_per_node is above 1, else full. The start and `plan --memory` say which."""
    shard_size: int | None = setting(None, at_least=1, changes=NOTHING)
    """Ranks that share one copy of the base with shard=hybrid, e.g. those of a node; must divide num_workers."""
    micro_batch_size: DefaultInt = setting(None, at_least=1, changes=ROUNDING)
    """Images of a group per forward pass; must divide group_size (for dpo: at least 2). Ranks share groups in parts of
    this size. null = the largest that does, up to 16 (FLUX.1-Kontext 8, Qwen-Image-Edit 2: that fits 80 GB)."""
    timesteps_per_forward: int | None = setting(1, at_least=1, changes=ROUNDING)
    """Trained denoising steps of an image per forward pass; must divide their number; null = all of them."""
    updates_per_batch: int = setting(1, at_least=1)
    """Optimizer steps per training step; must divide prompts_per_step, and be 1 with hand_over=stream."""
    learning_rate: DefaultFloat = setting(None, above=0)
    """AdamW's learning rate, after the warm-up and before the schedule. null = the model family's for a LoRA, with
    tune=full a hundredth of it."""
    betas: tuple[float, float] = setting((0.9, 0.999), at_least=0, below=1, pair=True)
    """AdamW's decay rates of the first and the second moment, per optimizer step."""
    eps: float = setting(1e-8, above=0)
    """AdamW's eps. If gradients are not much larger, it acts like a lower learning rate, and the run warns."""
    weight_decay: float = setting(1e-4, at_least=0)
    """AdamW's decoupled weight decay, as a share of the learning rate per optimizer step."""
    lr_schedule: str = setting("constant", choices=("constant", "linear", "cosine"))
    """constant, linear or cosine (both to zero at total_steps), after the warm-up."""
    warmup_steps: int = setting(0, at_least=0)
    """Training steps over which the learning rate rises linearly to its full value."""
    max_grad_norm: float = setting(1.0, above=0, infinite=True)
    """Largest L2 norm of the whole gradient; a gradient with a larger norm is scaled down to it."""
    gradient_checkpointing: str = setting(
        "none", choices=("none", "every_4", "every_3", "every_2", "full", "auto"), changes=ROUNDING
    )
    """Blocks that recompute their activations in the backward pass: none, every fourth, third or second, or all of them
    (full: least memory, about a third more time). auto: the first of these with which the planned memory of a trainer
    rank, activations included, takes at most 90 % of its GPU; none on CPUs. The start and `plan --memory` say which."""
    compile: bool = setting(False, changes=ROUNDING)
    """Compile each block with torch.compile. Its kernels round differently from those of a rollout without compile."""
    cpu_offload: bool = setting(False, changes=ROUNDING)
    """Keep the frozen base in host memory (FSDP2's CPU offload)."""
    versions_on: str = setting("device", choices=("device", "host"), changes=NOTHING)
    """Memory in which a rank keeps the last max_staleness + 1 versions and those on their way to rollout workers. host
    saves 8 bytes of the device per trained number in bfloat16 (one_step_off); each use is a copy to the device. Not
    host with the transports nccl and pynccl."""
    sum_on: str = setting("device", choices=("device", "host"), changes=NOTHING)
    """Memory of the exact sum of the gradients. host saves 8 bytes of the device per trained number, 16 with several
    ranks; each part's gradient is then copied to the host and added there, for which the rank waits."""
    prefetch: int = setting(1, at_least=0, changes=ROUNDING)
    """Blocks of the sharded base that are gathered while another block computes."""
    ema_decay: float | None = setting(None, at_least=0, below=1)
    """Largest decay of a moving average (EMA) of the weights, which evaluations and export then use. null = no EMA."""
    ema_every: int = setting(8, at_least=1)
    """Optimizer steps between two updates of the EMA."""

    @property
    def is_hybrid(self) -> bool:
        return self.shard == "hybrid"

    @property
    def holds_all(self) -> bool:
        return self.shard == "none"


@dataclass
class CheckpointEngineConfig:
    """The delivery of new weights from the trainer to the rollout workers."""

    transport: str = setting("object_store", choices=("object_store", "gloo", "nccl", "pynccl", "auto"))
    """Transport of the bytes: Ray's object store, or the collective transports gloo, nccl and pynccl, which broadcast.
    auto = nccl if the trainer and every rollout worker have their own GPU, else object_store."""
    retries: int = setting(3, at_least=0)
    """Retries of a delivery that failed or arrived damaged, before the worker is replaced."""
    setup_seconds: float = setting(60.0, above=0)
    """Seconds for setting up a group of a collective transport, plus 0.1 for each member."""
    ready_seconds: float = setting(10.0, above=0)
    """Seconds within which each member of a group must answer that it is ready for the next version."""
    bucket_bytes: int = setting(64 << 20, at_least=256)
    """Bytes of all trainer ranks together that the first one gathers at a time where each rank has a share of the
    weights (tune=full, trainer.shard=full). It sends from host memory, so `transport` is not nccl or pynccl then."""
    max_members: int = setting(64, at_least=1)
    """Rollout workers that are all in one group of a collective transport, at most. If there are more, one of each node
    is a member, of however many nodes; it passes every version on to the others through the node's memory."""


@dataclass
class SaveConfig:
    """Checkpoints, which have everything that a resumed run needs."""

    every: int | None = setting(None, at_least=0)
    """Training steps between checkpoints; 0 = only at the start and at the end; null = with a LoRA, after each step
    that ends five minutes after the last checkpoint or later, with tune=full as 0."""
    keep: int = setting(2, at_least=1)
    """Newest checkpoints that are kept; older ones are deleted."""
    best: str | None = None
    """Name of a score of evaluations: `reward`, a key of reward.terms or of evaluate.reward.terms. Every evaluated
    version then gets a checkpoint, that of the version with the best score is kept, too, and its weights are written to
    lora_best/ (tune=full: transformer_best/)."""


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


@dataclass
class MonitorConfig:
    """Trackers and the report, besides the console and the files of the run directory."""

    tensorboard: bool = False
    """Write TensorBoard files to the run directory."""
    wandb: bool = False
    """Use Weights & Biases; offline without WANDB_API_KEY and without a login."""
    wandb_project: str = "async_flowrl"
    """Project of the run at Weights & Biases."""
    wandb_entity: str | None = None
    """User or team at Weights & Biases; null = the account's own."""
    wandb_tags: list[str] = field(default_factory=list)
    """Tags of the run at Weights & Biases."""
    metric_aliases: str = setting("none", choices=("none", "verl_omni"))
    """verl_omni: trackers also get metrics by verl-omni's names if they are the same; metrics.jsonl does not change."""
    report: bool = True
    """Write report.html at the end of the run."""
    report_mib: float = setting(16.0, at_least=0)
    """MiB of images in report.html; further images are left out, and the page says so."""
    kept_images: int = setting(4, at_least=0)
    """Images of each evaluated prompt that are saved as files in images/step_N/, for the report; 0 = none."""
    kept_side: int = setting(512, at_least=16)
    """Pixels of the longest side of these files; larger images are reduced."""


@dataclass
class ProfileConfig:
    """Traces of torch's profiler."""

    steps: list[int] = field(default_factory=list)
    """Training steps of which every worker traces the rollout tickets and the update with torch's profiler, to
    profile/. Traces do not change the weights, but a resumed run must have the same list."""


@dataclass
class HardwareConfig:
    """Facts about the devices that the run cannot find out."""

    peak_tflops: float | None = setting(None, above=0)
    """Dense TFLOP/s of one worker's device in model.dtype, from which MFU is computed; null = known values by the name
    of an NVIDIA device."""


@dataclass
class DeadlinesConfig:
    """Seconds that each phase may take. After that its worker is given up, or the run ends and names what was late."""

    download: float = setting(7200.0, above=0, infinite=True)
    """Seconds until every node has the model's files, which one worker of each node fetches from the hub."""
    load: float = setting(900.0, above=0, infinite=True)
    """Seconds until a new worker has its model and serves."""
    generate: float = setting(600.0, above=0, infinite=True)
    """Seconds for the images of one ticket. With placement=shared without the time that it waits for training: the
    worker is asked, and one that hangs is found within twice as long for each of its tickets."""
    score: float = setting(300.0, above=0, infinite=True)
    """Seconds for the rewards of one group."""
    publish: float = setting(120.0, above=0, infinite=True)
    """Seconds for one delivery of weights. With tune=full and trainer.shard=full: for each answer of a trainer rank,
    and for all that one rollout worker does with one version; it does not pay for its waits for ranks."""
    update: float = setting(1800.0, above=0, infinite=True)
    """Seconds for one group's share of an update, for its end, or for writing a checkpoint. With placement=shared, a
    call to train may take 5 * deadlines.generate * rollout.tickets_per_batch longer, because it waits for the ticket
    under way, and that may have to be found hanging first."""
    stall: float = setting(60.0, above=0, infinite=True)
    """Seconds without any change after which the controller's log says which tickets wait for what."""


@dataclass
class LimitsConfig:
    """Numbers of failures of one kind, and what happens when there are more."""

    ticket_attempts: int = setting(6, at_least=1)
    """Attempts at one ticket. If all are lost, the run ends, because the ticket itself probably kills its workers."""
    workers_lost_in_a_row: int = setting(4, at_least=0, at_most=10)
    """Workers that one place of the rollout pool, such as rollout-0, may lose in a row without a finished ticket; one
    more ends the run. The pause before the n-th is replaced is 2^(n-1) - 1 seconds."""
    recoveries: int = setting(3, at_least=0)
    """Recoveries of the run from the death of a trainer rank, in a row without a step that had not been trained before;
    the next such death ends it."""
    missed_checkpoints: int = setting(3, at_least=1)
    """Checkpoints in a row that could not be written after which the run ends; fewer are warnings."""


@dataclass
class RuntimeConfig:
    """The place where the workers run."""

    backend: str = setting("ray", choices=("ray", "local"))
    """ray (separate processes) or local (threads in this process, for tests and debugging)."""
    address: str | None = None
    """Address of a Ray cluster; null starts one on this machine."""
    numa_binding: bool = False
    """Keep each worker that has a GPU, and its threads, on the CPUs of the GPU's NUMA node; the log names them."""

    @property
    def in_threads(self) -> bool:
        return self.backend == "local"

    @property
    def own_cluster(self) -> bool:
        """Whether the run starts a Ray cluster of its own, on this machine."""
        return self.backend == "ray" and self.address is None

    @property
    def on_this_machine(self) -> bool:
        return self.in_threads or self.address is None


@dataclass
class Config:
    name: str = setting("one_step_off", changes=NOTHING)
    """Name of the run: part of output_dir, and shown by monitors."""
    output_dir: str = setting("outputs/${name}", changes=NOTHING)
    """Run directory: everything the run writes. A new run wants it empty."""
    deterministic: bool = setting(True, changes=ROUNDING)
    """true: rollout and trainer use only kernels that give the same bits for the same input. false: also faster ones on
    GPUs; then a run cannot be repeated bit for bit."""
    seed: int = setting(0, at_least=0, at_most=MAX_SEED)
    """Seed of every random draw of the training: prompts, noise, windows, the LoRA's initial weights."""
    mode: str | None = setting(None, choices=("sync", "stream", "one_step_off", "fully_async"), changes=NOTHING)
    """Name of the mode that max_staleness and hand_over make; if given, they must agree with it. null = no check."""
    total_steps: int = setting(100, at_least=1)
    """Training steps; in each, prompts_per_step * group_size images are generated, scored and trained on. With
    lr_schedule=constant a run may be resumed with more of them."""
    epochs: int | None = setting(None, at_least=1, changes=NOTHING)
    """Passes over the training prompts after which the run ends, unless total_steps ends it before; null = no limit."""
    prompts_per_step: int = setting(2, at_least=1)
    """Prompts per training step, one group of images each."""
    group_size: int = setting(16, at_least=1)
    """Images per prompt, whose rewards are compared with each other; with direct_align 1 is enough."""
    ticket_size: int | None = setting(None, at_least=1, changes=ROUNDING)
    """Images per ticket, the work that a rollout worker gets at a time; must divide group_size; null = group_size."""
    max_staleness: int = setting(1, at_least=0)
    """Policy versions by which an image may be older than the weights it trains: images of step s are made with version
    max(0, s - max_staleness). 0: only fresh images, so generation waits for the update. 1: the images of the next step
    are made during an update. Each further one lets generation run one more step ahead and keeps one more version in
    memory."""
    hand_over: str = setting("batch", choices=("batch", "stream"), changes=NOTHING)
    """batch: training begins when all tickets of the step are ready. stream: each group is trained when it is ready."""
    resume: str = setting("never", changes=NOTHING)
    """never; auto: from the newest checkpoint in output_dir; force: the same, but other prompts or another
    configuration than the checkpoint's give a warning instead of an error; or the path of a checkpoint."""
    placement: str = setting("separate", choices=("separate", "shared"), changes=NOTHING)
    """separate: rollout and trainer have their own devices. shared: each process samples and trains, whichever is next,
    on one copy of the base."""
    time_limit: float | None = setting(None, above=0, infinite=True, changes=NOTHING)
    """Seconds after which the run writes a checkpoint and exits with the code for a resumable run; null = no limit."""
    allow_oom: bool = setting(False, changes=NOTHING)
    """Start even if weights, optimizer and versions alone are larger than the device's memory, or what a node's
    processes certainly need than the node's memory."""
    dry_run: bool = setting(False, changes=NOTHING)
    """Compose and check the configuration, print the plan, and stop."""
    console: str = setting("auto", choices=("auto", "bar", "lines", "quiet"), changes=NOTHING)
    """Output of the run on stdout. bar: a progress bar. lines: one plain line per step. quiet: only warnings, errors
    and the reason of an early end. auto: bar on a terminal, else lines."""
    tune: str = setting(LORA, choices=(LORA, FULL))
    """The trained weights: lora (a LoRA) or full (the transformer's own weights; see docs/do/full_weights.md)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    full: FullConfig = field(default_factory=FullConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig, metadata=FREE)
    save: SaveConfig = field(default_factory=SaveConfig, metadata=FREE)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig, metadata=FREE)
    monitor: MonitorConfig = field(default_factory=MonitorConfig, metadata=FREE)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig, metadata=FREE)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig, metadata=FREE)
    limits: LimitsConfig = field(default_factory=LimitsConfig, metadata=FREE)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig, metadata=FREE)

    def __post_init__(self) -> None:
        rollout, trainer, model = self.rollout, self.trainer, self.model
        of_rollout = (rollout.resolution, rollout.num_inference_steps, rollout.true_cfg_scale, rollout.guidance_scale)
        most = MICRO_BATCH
        if None in (self.lora.rank, *of_rollout, trainer.learning_rate, trainer.micro_batch_size):
            family = model.tiny.family if (model.family, model.path) == ("auto", TINY) else model.family
            defaults = model_defaults(model.path, family, model.revision)
            if self.tune == FULL:
                defaults["trainer"]["learning_rate"] *= 0.01
            most = defaults["trainer"].pop("micro_batch_size", most)
            for section, values in defaults.items():
                _fill(getattr(self, section), values)
        pair = 2 if self.algorithm.name == "dpo" else 1
        fitting = [size for size in range(1, most + 1) if self.group_size % size == 0]
        _fill(self.lora, {"alpha": 2.0 * self.lora.rank})
        _fill(trainer, {"micro_batch_size": max(pair, *fitting)})

    @property
    def mode_name(self) -> str:
        if self.max_staleness == 0:
            return "sync" if self.hand_over == "batch" else "stream"
        return "one_step_off" if self.max_staleness == 1 else "fully_async"

    @property
    def images_per_ticket(self) -> int:
        return self.ticket_size or self.group_size

    @property
    def live_versions(self) -> int:
        """Number of versions that unfinished tickets can need: the newest one and max_staleness before it."""
        return self.max_staleness + 1

    @property
    def versions_on_host(self) -> bool:
        """Whether rollout workers keep their versions in host memory (`rollout.versions_on`)."""
        where = self.rollout.versions_on
        return where == "host" or (where == "auto" and self.tune == FULL)

    @property
    def trained_in_words(self) -> str:
        """What is trained: "LoRA of rank 32, from PATH" or "full weights"."""
        start = "" if self.lora.path is None else f", from {self.lora.path}"
        return "full weights" if self.tune == FULL else f"LoRA of rank {self.lora.rank}{start}"

    @property
    def keeps_state(self) -> bool:
        """Whether the trainer's state is kept after every step; whole weights are too large for that."""
        return self.tune == LORA

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks share the base, with tune=full all weights; shard=auto that is not replaced means none."""
        return self.trainer.cpu_offload or self.trainer.shard in ("full", "hybrid")

    @property
    def layout_is_open(self) -> bool:
        """Whether it is not known yet how the ranks hold the base (trainer.shard=auto)."""
        return self.trainer.shard == "auto" and self.trainer.num_workers > 1

    @property
    def in_shares(self) -> bool:
        """Whether each trainer rank has a share of what it trains (tune=full with trainer.shard=full)."""
        return self.tune == FULL and self.trainer.num_workers > 1 and self.is_sharded

    def ranks_per_replica(self, ranks: int, *, sharded: bool) -> int:
        """Returns how many of `ranks` share one copy of the base; 1 if it is not sharded."""
        # With `trainer.shard=auto`, the ranks of one node if there are several: blocks are then gathered inside it.
        if not sharded:
            return 1
        trainer = self.trainer
        if trainer.shard == "auto" and trainer.workers_per_node and trainer.workers_per_node > 1:
            return trainer.workers_per_node
        return (trainer.shard_size or ranks) if trainer.is_hybrid else ranks


def _fill(section: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if getattr(section, key) is None:
            setattr(section, key, value)
