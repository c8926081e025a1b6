"""The configuration: one typed tree, registered with Hydra as `schema`.

Under each field stands what it means, with its unit; `setting` adds the values it takes and what changing it does.
"""

from dataclasses import dataclass, field
from typing import Any

from async_flowrl.config.algorithm_schema import AlgorithmConfig
from async_flowrl.config.settings import MAX_SEED, NOTHING, ROUNDING, Rule, setting

LORA, FULL = "lora", "full"
"""What `tune` can be."""
_FREE = {"rule": Rule(changes=NOTHING)}
"""Marks a section of which no field changes the weights."""


@dataclass
class TinyConfig:
    """The tiny random model built when `model.path=tiny`."""

    family: str = "qwen_image"
    """qwen_image, sd3, flux, z_image or sana, or `pkg.module:attr` of your own."""
    layers: int = setting(2, at_least=1)
    """Transformer blocks, of each kind that the family has."""
    heads: int = setting(8, at_least=1)
    """Attention heads of 16 channels each."""
    contrast: float = setting(3.0, above=0)
    """Factor on the VAE's last convolution: a random decoder paints in shades of grey, this spreads them."""
    seed: int = setting(0, at_least=0, at_most=MAX_SEED)
    """Seed of the random weights."""


@dataclass
class ModelConfig:
    """The base model: the same for rollout and trainer."""

    path: str = "tiny"
    """`tiny` (built offline and kept in $ASYNC_FLOWRL_CACHE, or ~/.cache/async_flowrl), a local diffusers folder, or a
    hub name such as Qwen/Qwen-Image."""
    revision: str | None = None
    """Hub revision; null takes the newest and records which it was."""
    family: str = setting("auto", changes=NOTHING)
    """Name in the policies registry, or `pkg.module:attr` of your own; `auto` reads it from model_index.json."""
    dtype: str = setting("auto", choices=("auto", "float32", "bfloat16"))
    """What the network computes in; auto = what the transformer's files hold. Latents, sigmas and log-probs are float32
    always."""
    max_sequence_length: int | None = setting(None, at_least=1)
    """Text tokens a prompt is padded or cut to, where the family does that; null = the diffusers pipeline's default."""
    attention_backend: str | None = setting(None, changes=ROUNDING)
    """One of diffusers' attention backends, e.g. flash or _native_cudnn; null = torch's own choice of kernel."""
    tiny: TinyConfig = field(default_factory=TinyConfig)


@dataclass
class LoraConfig:
    """The adapter that is trained with tune=lora; the base model stays as it is. With tune=full it means nothing."""

    rank: int = setting(8, at_least=1)
    """Inner dimension of the adapter's two matrices: what it can express, and what a version weighs on the wire."""
    alpha: float = setting(16.0, above=0)
    """Scale: the adapter's product is multiplied by alpha / rank."""
    targets: list[str] | None = None
    """Module name suffixes of the layers that get an adapter; null takes the family's default list."""
    path: str | None = None
    """Warm start from a diffusers or PEFT LoRA; it is then also the KL reference. null starts at the base model."""


@dataclass
class FullConfig:
    """What tune=full trains: every parameter of the transformer, with float32 masters."""

    freeze: list[str] = field(default_factory=list)
    """Patterns of parameter names that stay as they are, * standing for anything: ['pos_embed.*','*.norm*']. [] =
    nothing is frozen."""


@dataclass
class RolloutConfig:
    """The pool that generates images."""

    num_workers: int = setting(1, at_least=1, changes=NOTHING)
    """Rollout workers, each with a whole model."""
    workers_per_node: int | None = setting(None, at_least=1, changes=NOTHING)
    """Workers on each of num_workers / workers_per_node nodes, exactly so many; null = wherever there is room."""
    min_workers: int | None = setting(None, at_least=1, changes=NOTHING)
    """Workers that the run starts with at least, and ends without (docs/do/nodes.md); null = num_workers."""
    max_workers: int | None = setting(None, at_least=1, changes=NOTHING)
    """Workers that the pool grows to while nodes bring seats for them; null = num_workers. A pool with min_workers or
    max_workers also gives up the workers of a node that is drained."""
    gpus_per_worker: float = setting(1.0, at_least=0, changes=NOTHING)
    """GPUs per worker, where the cluster has any; a custom CPU resource stands in where it has none. vllm_omni spreads
    the network over all GPUs of a worker (tensor parallel), which changes roundings."""
    engine: str = setting("diffusers", choices=("diffusers", "vllm_omni"))
    """diffusers (the reference) or vllm_omni (needs the extra `vllm-omni`; see docs/rollout_engines.md)."""
    batch_size: int | None = setting(None, at_least=1, changes=ROUNDING)
    """Images of a ticket per forward pass; null = all of them. It cuts a ticket into fixed chunks."""
    tickets_per_batch: int = setting(1, at_least=1, changes=ROUNDING)
    """Training tickets that go through the network in one batch: always the same ones, the next so many of a step. For
    tickets too small to fill a GPU; an image's last float bits then depend on its batch."""
    threads: int = setting(1, at_least=1, changes=ROUNDING)
    """Torch threads per worker."""
    compile: bool = setting(False, changes=ROUNDING)
    """torch.compile of each block, by the diffusers engine."""
    text_encoder: str = setting("resident", choices=("resident", "offload", "cached"), changes=NOTHING)
    """Where a rollout worker keeps the text encoder: resident on the device; offload: in host memory, and on the device
    only while new prompts are encoded; cached: nowhere. Embeddings are then files in $ASYNC_FLOWRL_CACHE (or
    ~/.cache/async_flowrl), and the encoder is loaded for prompts that have none, before the network or in its place."""
    encode_ahead: int = setting(1024, at_least=1, changes=NOTHING)
    """With text_encoder=cached: prompts that all workers together encode before they start, and that the encoder goes
    on with whenever it is loaded for a new one."""
    vae_slicing: bool = setting(False, changes=ROUNDING)
    """Decode one image at a time, whatever went through the network together: less memory."""
    vae_tiling: bool = False
    """Decode large images by overlapping tiles: less memory, and other pixels where tiles are blended. The model's VAE
    says what is large (Qwen-Image: sides above 256 pixels, SD3 and FLUX: above 1024)."""
    environment: dict[str, str] = field(default_factory=dict, metadata=_FREE)
    """Environment variables of the pool's processes, e.g. {NCCL_SOCKET_IFNAME: eth0}; on the command line
    `+rollout.environment={…}`."""
    resolution: Any = 32
    """Pixels of an image: an integer, each side of a square one, or [height, width]. The model family says which
    multiples there are; a prompt may bring a size of its own (docs/do/sizes.md)."""
    resolutions: list[Any] = field(default_factory=list)
    """Several sizes, each as above, e.g. [512,[448,576],[576,448]]: every group of images draws one by the seed, and a
    prompt of an evaluation keeps the one it draws. [] = all have rollout.resolution."""
    num_inference_steps: int = setting(6, at_least=2)
    """Denoising steps of an image that is trained on."""
    true_cfg_scale: float = setting(1.0, at_least=0)
    """Scale of classifier-free guidance with a negative prompt, above 1; 1 = off (half the cost), and so is 0."""
    guidance_scale: float = setting(0.0, at_least=0)
    """Scale of the embedded guidance of distilled models (FLUX); 0 = none."""
    negative_prompt: str = " "
    """What classifier-free guidance leads away from, for prompts that bring no negative prompt of their own."""


@dataclass
class ServeConfig:
    """A server of this reward's own, which the run starts, watches and stops."""

    command: Any = None
    """Text, or a list of texts, of the program and its arguments; no shell reads it. {port}, {host} and {token_file}
    stand for what the run gives it."""
    gpus: float = setting(0.0, at_least=0, changes=NOTHING)
    """GPUs of each server, which sees no other ones; a custom CPU resource stands in where the cluster has none."""
    replicas: int = setting(1, at_least=1, changes=NOTHING)
    """Servers; groups are spread over them."""
    health: str = setting("/health", changes=NOTHING)
    """Path that answers 200 as soon as the server can score."""
    requirements: str | None = None
    """A requirements.txt: the command then runs in an environment of its own, made once per node and kept."""
    port: int | None = setting(None, at_least=1, at_most=65535, changes=NOTHING)
    """TCP port of the first replica, the next ones count up; null = any that is free."""
    start_seconds: float = setting(900.0, above=0, changes=NOTHING)
    """Seconds from its start until the server must be healthy; making its environment does not count."""
    restarts: int = setting(3, at_least=0, changes=NOTHING)
    """Restarts of each replica that has died or hung. One more loses it: that ends the run, or, for a term with
    required: false and a held-out one, leaves the term to its other replicas, and without scores after the last."""
    hung_seconds: float = setting(120.0, above=0, infinite=True, changes=NOTHING)
    """Seconds for which a server that was up may leave its health path without a 200 before it counts as hung and is
    started again. One that cannot answer it while it scores needs more than its longest request takes, or .inf."""
    hung_calls: int = setting(2, at_least=0, changes=NOTHING)
    """Calls of reward workers in a row that a server may let time out without any answer before it counts as hung,
    whatever its health path says; 0 = never."""
    environment: dict[str, str] = field(default_factory=dict, metadata=_FREE)
    """Environment variables of the server; {token} in them stands for the token that this run asks it with."""


@dataclass
class RewardTerm:
    """One reward of the sum."""

    weight: float = 1.0
    """Factor on this reward in the sum; below 0 it is trained against."""
    name: str | None = None
    """Registered name or `pkg.module:attr`; null = the key under `reward.terms`, or `http` for one with `serve`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward, e.g. {model: …}; which there are is the reward's to say."""
    required: bool = True
    """false: a group that this term cannot score after the retries is trained on the sum of the others, counted and
    shown; such scores are written down, so that a resume has the same. true: reward.on_error says what happens."""
    workers: int | None = setting(None, at_least=1, changes=NOTHING)
    """Workers of a pool that scores by this term alone, beside the others. A term that sets this or one of the next
    two gets such a pool, and what it leaves null is as in reward.*; all null = scored by the shared pool's workers."""
    gpus_per_worker: float | None = setting(None, at_least=0, changes=NOTHING)
    """GPUs per worker of the term's own pool; see reward.gpus_per_worker."""
    threads: int | None = setting(None, at_least=1, changes=NOTHING)
    """Torch threads per worker of the term's own pool."""
    serve: ServeConfig | None = None
    """A server that the run starts for this term, whose name is then http where it says none; null = no server."""


@dataclass
class RewardConfig:
    """The pool that scores images, and what it scores them by."""

    num_workers: int = setting(1, at_least=1, changes=NOTHING)
    """Reward workers; each scores one group at a time, by all terms that have no pool of their own."""
    gpus_per_worker: float = setting(0.0, at_least=0, changes=NOTHING)
    """GPUs per worker, also a fraction: 0.25 lets four workers share one. A worker with 0 sees no GPU at all. Where the
    cluster has none, a custom CPU resource stands in; with runtime.backend=local, threads do, which see what this
    process sees."""
    threads: int = setting(1, at_least=1, changes=NOTHING)
    """Torch threads per worker."""
    environment: dict[str, str] = field(default_factory=dict, metadata=_FREE)
    """Environment variables of the pool's processes."""
    terms: dict[str, RewardTerm] = field(default_factory=dict)
    """Name → term; the reward is the weighted sum."""
    on_error: str = setting("fail", choices=("fail", "skip"))
    """When a score cannot be had after the retries: fail ends the run; skip drops the group, counted and shown. An
    evaluation ends no run: what it lacks is named, and the exit code is 3."""
    retries: int = setting(3, at_least=0, changes=NOTHING)
    """Retries of what failed: of a term, on the next free worker of its pool; of a pointwise term, image by image."""
    backoff: float = setting(0.5, at_least=0, changes=NOTHING)
    """Seconds before the first retry; doubled each time."""
    concurrency: int = setting(8, at_least=1, changes=NOTHING)
    """Images of a group that a worker scores at a time by a term that takes one image per call (pointwise). A term that
    fails for an image is tried again for that image alone, in the worker and within deadlines.score."""


@dataclass
class CurriculumConfig:
    """Prompts whose images all get one reward teach nothing: they are set aside for a while."""

    after: int | None = setting(None, at_least=1)
    """Groups of images, one after the other, without any spread of rewards, after which a prompt is set aside; null =
    none ever is. Groups count that are surely trained when a prompt is chosen: more than max_staleness steps ago."""
    skip_epochs: int = setting(1, at_least=1)
    """Passes over the prompts that it is left out of; then it comes once, and goes on coming if its rewards differ."""


@dataclass
class DataConfig:
    """Prompts."""

    train: str = "prompts/two_prompts.txt"
    """txt, jsonl or parquet, or a folder with a train split (see docs/data.md). Relative paths are looked up in the
    working directory, then among the shipped files."""
    evaluation: str | None = setting(None, changes=NOTHING)
    """The same for the prompts of evaluations, or a folder with a test split. null = what data.held_out says; prompts
    that are held out are not trained, and a resume wants the same training prompts."""
    prompt_key: str = "prompt"
    """Column of a jsonl or parquet file that holds the prompt."""
    weight_key: str | None = None
    """Column with a weight from 0 on: over many epochs a prompt is drawn in proportion to it, in each epoch as often as
    that or once more or less. An epoch still has as many draws as there are prompts. null = each once per epoch."""
    held_out: float | None = setting(None, at_least=0, below=1)
    """Share of the prompts of data.train, by their text, that are evaluated instead of trained. null = with
    data.evaluation=null, 16 of them (at most an eighth) where there are 64 different ones; 0 = none."""
    held_out_seed: int = setting(0, at_least=0, at_most=MAX_SEED)
    """Another seed holds out other prompts."""
    shuffle: bool = True
    """Another order of the prompts in every epoch, drawn from the seed; false keeps the file's."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


@dataclass
class TrainerConfig:
    """The pool that trains."""

    num_workers: int = setting(1, at_least=1, changes=NOTHING)
    """Trainer ranks, any number: they share the groups of a step, and the weights do not depend on it."""
    workers_per_node: int | None = setting(None, at_least=1, changes=NOTHING)
    """Ranks on each of num_workers / workers_per_node nodes, exactly so many and in order, so that neighbours share a
    node; null = on as few nodes as can be."""
    gpus_per_worker: float = setting(1.0, at_least=0, changes=NOTHING)
    """GPUs per rank, where the cluster has any; 0 trains on the CPU."""
    threads: int = setting(1, at_least=1, changes=ROUNDING)
    """Torch threads per rank."""
    environment: dict[str, str] = field(default_factory=dict, metadata=_FREE)
    """Environment variables of the pool's processes, e.g. {NCCL_DEBUG: WARN, PYTORCH_CUDA_ALLOC_CONF: …}."""
    shard: str = setting("auto", choices=("auto", "none", "full", "hybrid"), changes=NOTHING)
    """How several ranks hold the frozen base: full (FSDP2: a share each, gathered block by block), none (each all of
    it, nothing to gather: then a rank that dies costs its share of one step), hybrid (every shard_size ranks hold it
    once between them, and end together), or auto: none on CPUs, and where the planned memory of a trainer rank,
    activations included, takes at most 90 % of its GPU (with the rollout worker where placement=colocated); elsewhere
    full, or hybrid over the ranks of a node where workers_per_node says how many these are. The start and
    `plan --memory` say which."""
    shard_size: int | None = setting(None, at_least=1, changes=NOTHING)
    """Ranks that hold the base once between them with shard=hybrid, those of a node for example; must divide
    num_workers."""
    micro_batch_size: int = setting(16, at_least=1, changes=ROUNDING)
    """Samples of a group per forward pass; must divide group_size. Ranks share groups in parts of so many."""
    timesteps_per_forward: int | None = setting(1, at_least=1, changes=ROUNDING)
    """Trained denoising steps batched into one forward pass; must divide their number; null = all of them."""
    updates_per_batch: int = setting(1, at_least=1)
    """Optimizer steps per batch of prompts_per_step prompts; refused with stream hand-over."""
    learning_rate: float = setting(3e-4, above=0)
    """AdamW's learning rate, after the warm-up and before the schedule."""
    betas: tuple[float, float] = setting((0.9, 0.999), at_least=0, below=1, pair=True)
    """AdamW's decay rates of the first and the second moment, per optimizer step."""
    eps: float = setting(1e-8, above=0)
    """AdamW's eps; where gradients are not much larger, it is a hidden cut of the learning rate, and the run warns."""
    weight_decay: float = setting(1e-4, at_least=0)
    """AdamW's decoupled weight decay, as a share of the learning rate per optimizer step."""
    lr_schedule: str = setting("constant", choices=("constant", "linear", "cosine"))
    """constant, linear or cosine (both to zero at total_steps), after the warm-up."""
    warmup_steps: int = setting(0, at_least=0)
    """Training steps over which the learning rate rises linearly to its full value."""
    max_grad_norm: float = setting(1.0, above=0, infinite=True)
    """L2 norm of the whole gradient above which it is scaled down to it."""
    gradient_checkpointing: str = setting(
        "none", choices=("none", "every_4", "every_3", "every_2", "full", "auto"), changes=ROUNDING
    )
    """Blocks that recompute their activations in the backward pass: none, every fourth, third or second, or all of them
    (full: least memory, about a third more time). auto: the first of these with which the planned memory of a trainer
    rank, activations included, takes at most 90 % of its GPU; none on CPUs. The start and `plan --memory` say which."""
    compile: bool = setting(False, changes=ROUNDING)
    """torch.compile of each block. Its kernels round differently from those of a rollout that does not compile."""
    cpu_offload: bool = setting(False, changes=ROUNDING)
    """FSDP2 CPU offload of the frozen base."""
    prefetch: int = setting(1, at_least=0, changes=ROUNDING)
    """Blocks of the sharded base that are gathered ahead of the one that computes."""
    ema_decay: float | None = setting(None, at_least=0, below=1)
    """Largest decay of an EMA of the trained weights; evaluation and export then use it. null = no EMA."""
    ema_every: int = setting(8, at_least=1)
    """Optimizer steps from one update of the EMA to the next."""


@dataclass
class CheckpointEngineConfig:
    """How new weights get from the trainer to the rollout workers."""

    transport: str = setting("object_store", choices=("object_store", "gloo", "nccl", "pynccl", "auto"))
    """What carries the bytes: Ray's object store, or a broadcast by gloo or NCCL; auto = nccl where the trainer and
    every rollout worker have a GPU of their own, object_store elsewhere."""
    retries: int = setting(3, at_least=0)
    """Retries of a delivery that failed or arrived damaged, before the worker is replaced."""
    setup_seconds: float = setting(60.0, above=0)
    """Seconds that making a group of the collective transports may take, and 0.1 more for each member."""
    ready_seconds: float = setting(10.0, above=0)
    """Seconds within which every member of a group answers that it is ready for the next version."""
    max_members: int = setting(64, at_least=1)
    """Rollout workers in one group of the collective transports, at most. Of more, one of each node is in it and passes
    every version on to its neighbours through the node's memory."""


@dataclass
class SaveConfig:
    """Checkpoints: everything a resumed run needs."""

    every: int = setting(0, at_least=0)
    """Training steps between checkpoints; 0 = only at the start and at the end."""
    keep: int = setting(2, at_least=1)
    """Newest checkpoints kept; older ones are deleted."""
    best: str | None = None
    """Name of an evaluated curve: `reward`, a key of reward.terms or of evaluate.reward.terms. Every evaluated version
    then gets a checkpoint, that of the best one is kept too, and its weights are written to lora_best/ (tune=full:
    transformer_best/)."""


@dataclass
class HeldOutConfig:
    """What evaluations are scored by besides the training's reward."""

    terms: dict[str, RewardTerm] = field(default_factory=dict)
    """Name → term that no image is trained on, as in reward.terms. The sign of its weight says which way is better;
    weight 0 is shown and judged by nothing. The workers of the reward pool score it; its failures end no run."""


@dataclass
class EvaluateConfig:
    """Evaluations run beside the training and change nothing of it."""

    every: int = setting(0, at_least=0)
    """Training steps between evaluations; 0 = only at the end (and before training, if asked)."""
    before_training: bool = True
    """Evaluate the weights the run starts from, too."""
    images_per_prompt: int = setting(8, at_least=1)
    """Images per prompt, from the same initial noises each time."""
    max_prompts: int = setting(16, at_least=1)
    """Prompts used, from the beginning of the file."""
    num_inference_steps: int | None = setting(None, at_least=1)
    """Denoising steps; null = as in training. Evaluation samples without noise after the initial one."""
    seed: int = setting(1234, at_least=0, at_most=MAX_SEED)
    """Seed of the initial noises: the same in every run, so that evaluations compare."""
    reward: HeldOutConfig = field(default_factory=HeldOutConfig)
    baseline: bool = False
    """Also evaluate the base model once, before training, at the steps and the guidance that it is usually sampled
    with: what the training has to beat. Needs lora.path=null."""
    baseline_steps: int | None = setting(None, at_least=1)
    """Denoising steps of the baseline; null = the model family's usual number (as configured where model.path=tiny)."""
    baseline_guidance: float | None = setting(None, at_least=0)
    """Guidance scale of the baseline, of the kind that the family is usually guided by; null = the family's usual."""
    on_hacking: str = setting("warn", choices=("warn", "stop", "ignore"))
    """When the trained reward rises while a held-out term gets worse beyond its noise: warn, stop (the run ends in
    order, resumable, with the best version's weights where save.best is set), or ignore. See docs/reward_hacking.md."""


@dataclass
class MonitorConfig:
    """Where a run shows itself, besides its console and the files of its directory."""

    tensorboard: bool = False
    """TensorBoard's files in the run directory."""
    wandb: bool = False
    """Weights & Biases; offline unless WANDB_API_KEY or a login is there."""
    wandb_project: str = "async_flowrl"
    """Project of the run at Weights & Biases."""
    wandb_entity: str | None = None
    """User or team there; null = the account's own."""
    wandb_tags: list[str] = field(default_factory=list)
    """Tags of the run there."""
    metric_aliases: str = setting("none", choices=("none", "verl_omni"))
    """verl_omni: trackers get metrics by verl-omni's names, too, where it has the same ones; metrics.jsonl stays."""
    report: bool = True
    """report.html at the end of the run."""
    report_mib: float = setting(16.0, at_least=0)
    """MiB of images in report.html; what does not fit is left out, and the page says so."""
    kept_images: int = setting(4, at_least=0)
    """Images of each evaluated prompt kept as files of their own in images/step_N/, for the report; 0 = none."""
    kept_side: int = setting(512, at_least=16)
    """Longest side of these files, pixels; larger images are reduced."""


@dataclass
class ProfileConfig:
    """Traces of single steps."""

    steps: list[int] = field(default_factory=list)
    """Training steps whose rollout tickets and update every worker traces with torch's profiler, into profile/. They
    change no weights, but a resume asks for the same list."""


@dataclass
class HardwareConfig:
    """What the run cannot find out about its devices."""

    peak_tflops: float | None = setting(None, above=0)
    """Dense TFLOP/s of one worker's device in model.dtype: what MFU is a share of; null = of NVIDIA devices by name."""


@dataclass
class DeadlinesConfig:
    """Seconds each phase may take before its worker is given up, or the run stops with the name of what was late."""

    download: float = setting(7200.0, above=0, infinite=True)
    """Seconds until every node has the model's files, which one worker of each node fetches from the hub."""
    load: float = setting(900.0, above=0, infinite=True)
    """Seconds until a new worker has its model and serves."""
    generate: float = setting(600.0, above=0, infinite=True)
    """Seconds for the images of one ticket."""
    score: float = setting(300.0, above=0, infinite=True)
    """Seconds for the rewards of one group."""
    publish: float = setting(120.0, above=0, infinite=True)
    """Seconds for one delivery of weights."""
    update: float = setting(1800.0, above=0, infinite=True)
    """Seconds for one group's share of an update, for its end, or for writing a checkpoint."""
    stall: float = setting(60.0, above=0, infinite=True)
    """Seconds without any change after which the controller's log says which tickets wait for what."""


@dataclass
class DelaysConfig:
    """Seeded random delays in seconds (uniform in 0..value), to test that timing changes nothing but time."""

    generate: float = setting(0.0, at_least=0)
    """Seconds after the images of a ticket."""
    score: float = setting(0.0, at_least=0)
    """Seconds after the rewards of a group."""
    update: float = setting(0.0, at_least=0)
    """Seconds after the update of a step."""
    publish: float = setting(0.0, at_least=0)
    """Seconds before a new version is digested and sent."""
    constant: bool = False
    """Exactly the value, every time, instead of a random one."""
    slow_worker: float = setting(1.0, at_least=1)
    """Factor on the time that the first rollout worker takes."""


@dataclass
class DebugConfig:
    """Disturbances, for tests of the run itself."""

    delays: DelaysConfig = field(default_factory=DelaysConfig, metadata=_FREE)
    freeze_publish: bool = False
    """Falsifier: keep sending version 0's bytes under newer names; the run must stop."""


@dataclass
class RuntimeConfig:
    """Where the workers run."""

    backend: str = setting("ray", choices=("ray", "local"))
    """ray (separate processes) or local (threads in this process, for tests and debugging)."""
    address: str | None = None
    """Ray cluster address; null starts one here."""
    numa_binding: bool = False
    """Keep each worker that owns a GPU, and its threads, on the CPUs of the GPU's NUMA node; the log says which."""


@dataclass
class Config:
    name: str = setting("one_step_off", changes=NOTHING)
    """Name of the run: part of output_dir, and shown by monitors."""
    output_dir: str = setting("outputs/${name}", changes=NOTHING)
    """Run directory: everything the run writes. A new run wants it empty."""
    deterministic: bool = setting(True, changes=ROUNDING)
    """Only kernels that give the same bits for the same work, in rollout and trainer. false: also faster ones on GPUs,
    and then no run repeats another bit for bit."""
    seed: int = setting(0, at_least=0, at_most=MAX_SEED)
    """Seed of every random draw of the training: prompts, noise, windows, the adapter's initial weights."""
    mode: str | None = setting(None, choices=("sync", "stream", "one_step_off", "fully_async"), changes=NOTHING)
    """Name of what max_staleness and hand_over say: if given, they must agree with it; null = no such check."""
    total_steps: int = setting(100, at_least=1)
    """Training steps; in each, prompts_per_step * group_size images are generated, scored and trained on. With
    lr_schedule=constant a run may be resumed with more of them."""
    epochs: int | None = setting(None, at_least=1, changes=NOTHING)
    """Passes over the training prompts after which the run ends, or after total_steps, whichever is sooner."""
    prompts_per_step: int = setting(2, at_least=1)
    """Prompts per training step, one group of images each."""
    group_size: int = setting(16, at_least=2)
    """Images per prompt: their rewards are compared with each other."""
    ticket_size: int | None = setting(None, at_least=1, changes=ROUNDING)
    """Images per ticket, the piece of work that one rollout worker gets; divides group_size; null = group_size."""
    max_staleness: int = setting(1, at_least=0)
    """Policy versions that an image may be behind the weights it trains: the images of step s are made with exactly
    version max(0, s - max_staleness). 0 trains on fresh images only, so generation waits for the update; 1 generates
    the next step during an update; every further one runs a step further ahead and keeps one more version in memory."""
    hand_over: str = setting("batch", choices=("batch", "stream"), changes=NOTHING)
    """batch: train when the step's tickets are all ready. stream: train each group as it gets ready."""
    resume: str = setting("never", changes=NOTHING)
    """never, auto (newest checkpoint in output_dir), force (the same, and other prompts or another configuration than
    the checkpoint's are a warning instead of a refusal), or a checkpoint's path."""
    placement: str = setting("separate", choices=("separate", "colocated"), changes=NOTHING)
    """separate pools, or colocated (rollout and trainer share a device; max_staleness 0 only)."""
    time_limit: float | None = setting(None, above=0, infinite=True, changes=NOTHING)
    """Seconds after which the run checkpoints and exits with the resumable code; null = no limit."""
    allow_oom: bool = setting(False, changes=NOTHING)
    """Start although weights, optimizer and versions alone are larger than the device found."""
    dry_run: bool = setting(False, changes=NOTHING)
    """Compose, check, print the plan, and stop."""
    preflight: bool = setting(False, changes=NOTHING)
    """Look at every node first, as `async-flowrl doctor` does, and start nothing where a check fails."""
    console: str = setting("auto", choices=("auto", "panel", "lines", "quiet"), changes=NOTHING)
    """What stdout shows of the run: a live panel, one plain line per step, or quiet: nothing but warnings, errors and
    why a run ended early; auto = panel on a terminal, lines elsewhere."""
    tune: str = setting(LORA, choices=(LORA, FULL))
    """What is trained: lora (an adapter) or full (the transformer's own weights; see docs/do/full_weights.md)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    full: FullConfig = field(default_factory=FullConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig, metadata=_FREE)
    save: SaveConfig = field(default_factory=SaveConfig, metadata=_FREE)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig, metadata=_FREE)
    monitor: MonitorConfig = field(default_factory=MonitorConfig, metadata=_FREE)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig, metadata=_FREE)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig, metadata=_FREE)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig, metadata=_FREE)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def mode_name(self) -> str:
        """What `mode` is, or would be where it is null."""
        return mode_name(self.max_staleness, self.hand_over)

    @property
    def images_per_ticket(self) -> int:
        """`ticket_size`, or a whole group where it is null."""
        return self.ticket_size or self.group_size

    @property
    def live_versions(self) -> int:
        """How many policy versions tickets under way can name: the current one and max_staleness before it."""
        return self.max_staleness + 1


def mode_name(max_staleness: int, hand_over: str) -> str:
    """The mode that these two numbers make."""
    if max_staleness == 0:
        return "sync" if hand_over == "batch" else "stream"
    return "one_step_off" if max_staleness == 1 else "fully_async"
