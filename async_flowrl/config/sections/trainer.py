"""The section `trainer` of the configuration: the pool that updates the weights."""

from dataclasses import dataclass, field

from async_flowrl.config.settings import FREE, NOTHING, ROUNDING, setting


@dataclass
class TrainerConfig:
    """The pool that trains."""

    num_workers: int = setting(1, at_least=1, changes=NOTHING)
    """Trainer ranks; they share the groups of a step. The trained weights do not depend on their number, except with
    tune=full and shard=full."""
    workers_per_node: int | None = setting(None, at_least=1, changes=NOTHING)
    """Ranks on each node: exactly this many, in order, on num_workers / workers_per_node nodes; null = on as few nodes
    as possible."""
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
    micro_batch_size: int = setting(16, at_least=1, changes=ROUNDING)
    """Images of a group per forward pass; must divide group_size (for dpo: at least 2). Ranks share groups in parts of
    this size."""
    timesteps_per_forward: int | None = setting(1, at_least=1, changes=ROUNDING)
    """Trained denoising steps of an image per forward pass; must divide their number; null = all of them."""
    updates_per_batch: int = setting(1, at_least=1)
    """Optimizer steps per training step; must divide prompts_per_step, and be 1 with hand_over=stream."""
    learning_rate: float = setting(3e-4, above=0)
    """AdamW's learning rate, after the warm-up and before the schedule."""
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
    prefetch: int = setting(1, at_least=0, changes=ROUNDING)
    """Blocks of the sharded base that are gathered while another block computes."""
    ema_decay: float | None = setting(None, at_least=0, below=1)
    """Largest decay of an exponential moving average (EMA) of the trained weights; evaluations and export then use it.
    null = no EMA."""
    ema_every: int = setting(8, at_least=1)
    """Optimizer steps between two updates of the EMA."""
