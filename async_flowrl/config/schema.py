"""The configuration: one typed tree, registered with Hydra as `schema`. Every field says what it means and its unit."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TinyConfig:
    """The tiny random model built when `model.path=tiny`."""

    family: str = "qwen_image"
    """qwen_image, sd3, flux or z_image."""
    layers: int = 2
    heads: int = 8
    contrast: float = 3.0
    """Factor on the VAE's last convolution: a random decoder paints in shades of grey, this spreads them."""
    seed: int = 0


@dataclass
class ModelConfig:
    path: str = "tiny"
    """`tiny` (built offline), a local diffusers folder, or a hub name such as Qwen/Qwen-Image."""
    revision: str | None = None
    """Hub revision; None takes the newest and records which it was."""
    family: str = "auto"
    """Name in the policies registry, or `pkg.module:attr` of your own; `auto` reads it from model_index.json."""
    dtype: str = "float32"
    """What the network computes in: float32 or bfloat16. Latents, sigmas and log-probs are float32 always."""
    max_sequence_length: int | None = None
    """Text tokens a prompt is padded or cut to, where the family does that; None = the diffusers pipeline's default."""
    attention_backend: str | None = None
    """One of diffusers' attention backends, e.g. flash or _native_cudnn; None = torch's own choice of kernel."""
    tiny: TinyConfig = field(default_factory=TinyConfig)


@dataclass
class LoraConfig:
    rank: int = 8
    alpha: float = 16.0
    targets: list[str] | None = None
    """Module name suffixes; None takes the family's default list."""
    path: str | None = None
    """Warm start from a diffusers or PEFT LoRA; it is then also the KL reference."""


@dataclass
class RolloutConfig:
    num_workers: int = 1
    gpus_per_worker: float = 1.0
    """Used where the cluster has GPUs; a custom CPU resource stands in where it has none. vllm_omni spreads the network
    over all GPUs of a worker (tensor parallel)."""
    engine: str = "diffusers"
    """diffusers (the reference) or vllm_omni (needs the extra `vllm-omni`; see docs/rollout_engines.md)."""
    batch_size: int | None = None
    """Images per forward pass; None = a whole ticket. It cuts a ticket into fixed chunks and never mixes tickets."""
    threads: int = 1
    """torch threads per worker. Part of what determines the weights bit for bit."""
    compile: bool = False
    """torch.compile of each block, by the diffusers engine."""
    resolution: int = 32
    num_inference_steps: int = 6
    true_cfg_scale: float = 1.0
    """Classifier-free guidance with a negative prompt; 1 = off (half the cost)."""
    guidance_scale: float = 0.0
    """Embedded guidance of distilled models (FLUX); 0 = none."""
    negative_prompt: str = " "


@dataclass
class AlgorithmConfig:
    name: str = "flow_grpo"
    """Registered name, or `pkg.module:attr` of your own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to an algorithm of your own; the built-in ones use the fields below."""
    final_images: bool = False
    """An algorithm of your own trains on final images: it samples without noise, like diffusion_nft and dpo."""
    sde_type: str = "sde"
    """sde (Flow-GRPO), dance_sde, cps."""
    noise_level: float = 1.0
    window: str = "none"
    """Which steps get noise and are trained: none (all but the last), random, sliding, list, fraction."""
    sde_window_size: int | None = None
    sde_window_range: tuple[int, int] | None = None
    """Half-open range of step indices; None = (0, num_inference_steps - 1)."""
    window_per: str = "group"
    """group | step: whether each group or the whole step draws its window."""
    window_interval: int = 25
    """sliding: updates before the window moves by one."""
    window_decay: str = "none"
    """sliding: how the interval shrinks at later places: none, linear or exponential (MixGRPO's variants)."""
    window_interval_min: int = 1
    """linear decay: the interval that would be reached at the last step that may be noisy."""
    window_decay_start: int = 13
    """exponential decay: step index of the window's start up to which the interval stays whole."""
    window_decay_rate: float = 0.1
    """exponential decay: rate per step index beyond it."""
    window_list: list[int] | None = None
    timestep_fraction: float = 1.0
    """fraction: share of the noisy steps that is trained, drawn at random."""
    same_initial_noise: bool = False
    clip_range: float = 1e-4
    clip_unit: str = "mean"
    """mean: bounds the ratio of mean log-probs (published recipes); nats: the true log-ratio, at any resolution."""
    kl_coef: float = 0.0
    kl_form: str = "code"
    """code: without sqrt(h), as the published coefficients assume. exact: the Gaussian KL per latent element.
    proximal: half the squared log-ratio to the weights at the start of the batch (MixGRPO), without a reference."""
    adv_clip_max: float = 5.0
    global_std: bool = False
    """Divide by the reward std of the whole batch instead of the group's. Needs batch hand-over."""
    normalise: str = "std"
    """std: divide by the reward std. none: only subtract the mean (Dr.GRPO)."""
    combine: str = "sum"
    """Several rewards: sum (weighted, then normalised) or per_reward (each normalised, then summed)."""
    correction: str | None = None
    """none | mask | tis; None = none for max_staleness <= 1, mask above."""
    correction_threshold: float = 0.66
    """mask: divergence from the behaviour policy, nats per step, from which rows that move further away are dropped."""
    tis_cap: float = 2.0
    beta: float = 1.0
    """diffusion_nft: mixing coefficient; dpo: inverse temperature."""
    advantage_mode: str = "continuous"
    """diffusion_nft: which advantages count: continuous, positive_only, negative_only, one_only (1 above 0), binary."""
    old_policy_decay: str = "copy"
    """diffusion_nft: copy, half (.5), slow (min(.001 n, .5)) or late (0 below 75, then min(.0075(n-75), .999))."""
    negate_reward: bool = False
    """Falsifier for tests: train against the reward."""
    permute_advantages: bool = False
    """Falsifier for tests: shuffle the advantages inside each group."""


@dataclass
class RewardTerm:
    weight: float = 1.0
    name: str | None = None
    """Registered name or `pkg.module:attr`; None = the key under `reward.terms`."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardConfig:
    num_workers: int = 1
    threads: int = 1
    terms: dict[str, RewardTerm] = field(default_factory=dict)
    """Name → weight; the reward is the weighted sum."""
    on_error: str = "fail"
    """fail | skip: when a score cannot be had after the retries; skip drops the group, counted and shown."""
    retries: int = 3
    backoff: float = 0.5
    """Seconds before the first retry; doubled each time."""


@dataclass
class DataConfig:
    train: str = "prompts/two_prompts.txt"
    """txt, jsonl or parquet. Relative paths are looked up in the working directory, then among the shipped files."""
    evaluation: str | None = None
    """None = the training prompts."""
    prompt_key: str = "prompt"
    shuffle: bool = True


@dataclass
class TrainerConfig:
    num_workers: int = 1
    gpus_per_worker: float = 1.0
    threads: int = 1
    """torch threads per rank. Part of what determines the weights bit for bit."""
    micro_batch_size: int = 16
    """Samples per forward pass and rank; must divide group_size / num_workers."""
    timesteps_per_forward: int | None = 1
    """Trained denoising steps batched into one forward pass; must divide their number; None = all of them."""
    updates_per_batch: int = 1
    """Optimizer steps per batch of prompts_per_step prompts; refused with stream hand-over."""
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    lr_schedule: str = "constant"
    """constant, linear or cosine (both to zero at total_steps), after the warm-up."""
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    gradient_checkpointing: bool = False
    compile: bool = False
    """torch.compile of each block. Its kernels round differently from those of a rollout that does not compile."""
    cpu_offload: bool = False
    """FSDP2 CPU offload of the frozen base."""
    prefetch: int = 1
    """Blocks of the sharded base that are gathered ahead of the one that computes."""
    ema_decay: float | None = None
    """EMA of the trainable weights; evaluation and export then use it."""
    ema_every: int = 8


@dataclass
class CheckpointEngineConfig:
    transport: str = "object_store"
    """object_store, gloo, nccl, pynccl or auto."""
    retries: int = 3


@dataclass
class SaveConfig:
    every: int = 0
    """Steps between checkpoints; 0 = only at the start and at the end."""
    keep: int = 2


@dataclass
class EvaluateConfig:
    every: int = 0
    """Steps between evaluations; 0 = only at the end (and before training, if asked)."""
    before_training: bool = True
    images_per_prompt: int = 8
    max_prompts: int = 16
    num_inference_steps: int | None = None
    """None = as in training. Evaluation samples without noise after the initial one."""
    seed: int = 1234


@dataclass
class MonitorConfig:
    progress: bool = True
    tensorboard: bool = False
    wandb: bool = False
    """Offline unless WANDB_API_KEY or a login is there."""
    wandb_project: str = "async_flowrl"
    report: bool = True


@dataclass
class ProfileConfig:
    steps: list[int] = field(default_factory=list)
    """Training steps whose rollout tickets and update every worker traces with torch's profiler, into profile/."""


@dataclass
class HardwareConfig:
    peak_tflops: float | None = None
    """Dense TFLOP/s of one worker's device in model.dtype: what MFU is a share of; null = of NVIDIA devices by name."""


@dataclass
class DeadlinesConfig:
    """Seconds each phase may take before the run stops with the name of what was late."""

    load: float = 900.0
    generate: float = 600.0
    score: float = 300.0
    publish: float = 120.0
    update: float = 1800.0
    stall: float = 60.0
    """Seconds without any change after which the controller's log says which tickets wait for what."""


@dataclass
class DelaysConfig:
    """Seeded random delays in seconds (uniform in 0..value), to test that timing changes nothing but time."""

    generate: float = 0.0
    score: float = 0.0
    update: float = 0.0
    publish: float = 0.0
    constant: bool = False
    """Exactly the value, every time, instead of a random one."""
    slow_worker: float = 1.0
    """The first rollout worker takes so many times as long, at least 1."""


@dataclass
class DebugConfig:
    delays: DelaysConfig = field(default_factory=DelaysConfig)
    freeze_publish: bool = False
    """Falsifier: keep sending version 0's bytes under newer names; the run must stop."""


@dataclass
class RuntimeConfig:
    backend: str = "ray"
    """ray (separate processes) or local (threads in this process, for tests and debugging)."""
    address: str | None = None
    """Ray cluster address; None starts one here."""


@dataclass
class Config:
    name: str = "one_step_off"
    output_dir: str = "outputs/${name}"
    seed: int = 0
    mode: str = "one_step_off"
    total_steps: int = 100
    epochs: int | None = None
    """Passes over the training prompts after which the run ends, or after total_steps, whichever is sooner."""
    prompts_per_step: int = 2
    group_size: int = 16
    ticket_size: int | None = None
    """Images per ticket; divides group_size; None = group_size."""
    max_staleness: int = 1
    hand_over: str = "batch"
    """batch: train when the step's tickets are all ready. stream: train each group as it gets ready, in order."""
    resume: str = "never"
    """never, auto (newest checkpoint in output_dir), or a checkpoint's path."""
    placement: str = "separate"
    """separate pools, or colocated (rollout and trainer share a device; max_staleness 0 only)."""
    time_limit: float | None = None
    """Seconds after which the run checkpoints and exits with the resumable code."""
    dry_run: bool = False
    """Compose, check, print the plan, and stop."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def images_per_ticket(self) -> int:
        """`ticket_size`, or a whole group where it is null."""
        return self.ticket_size or self.group_size

    @property
    def live_versions(self) -> int:
        """How many policy versions tickets under way can name: the current one and max_staleness before it."""
        return self.max_staleness + 1
