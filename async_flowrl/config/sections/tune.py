"""The sections `lora` and `full` of the configuration: the weights that each value of `tune` trains."""

from dataclasses import dataclass, field

from async_flowrl.config.settings import setting

LORA, FULL = "lora", "full"
"""The values of `tune`."""


@dataclass
class LoraConfig:
    """The LoRA that tune=lora trains; the base model is frozen. With tune=full these settings have no effect, and path
    must be null."""

    rank: int = setting(8, at_least=1)
    """Inner dimension of the LoRA's two matrices; a larger one can express more, and more bytes are sent."""
    alpha: float = setting(16.0, above=0)
    """Scale of the LoRA: the product of its matrices is multiplied by alpha / rank."""
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
