"""The reward `aesthetic`: LAION's rating of an image from its CLIP embedding; the prompt is ignored."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from async_flowrl.rewards.clip import Clip, as_openai_prepares
from async_flowrl.rewards.model_weights import check_path, check_pins, loading, read_weights, weights_file
from async_flowrl.types import ByteArray, Prompt

if TYPE_CHECKING:
    import torch

# Indices of the linear layers in the original Sequential; dropout is between them. A head with ReLU has others.
PLACES = (0, 2, 4, 6, 7)


@dataclass(eq=False)
class Aesthetic(Clip):
    """Rates each image from 1 to 10, in practice about 4 to 7 (Schuhmann 2022, "improved-aesthetic-predictor").

    The head is a chain of five linear layers, applied to the CLIP ViT-L/14 embedding of the image, scaled to length 1.
    `head` is a local file or folder, or a hub repository; `head_file` is the file name in a folder or repository. The
    default is TRL's copy of `sac+logos+ava1-l14-linearMSE.pth`.
    """

    head: str = "trl-lib/ddpo-aesthetic-predictor"
    head_file: str = "aesthetic-model.pth"
    head_revision: str | None = None
    name: ClassVar[str] = "aesthetic"
    _layers: list[Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pins(self.name, revision=(self.model, self.revision), head_revision=(self.head, self.head_revision))

    def check(self, prompt: Prompt) -> None:
        super().check(prompt)
        check_path(self.name, "head", self.head)

    def _pixels(self, images: Any, size: int) -> "torch.Tensor":
        return as_openai_prepares(images, size)

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        import torch

        with torch.inference_mode():
            layers = self._layers_of_head()
            return [float(x) for batch in self.image_embeddings(images) for x in _applied(layers, batch).double().cpu()]

    def of_tensor(self, images: "torch.Tensor", prompt: Prompt) -> "torch.Tensor":
        return _applied(self._layers_of_head(), self.tensor_embeddings(images))

    def _layers_of_head(self) -> list[Any]:
        """Returns (weight, bias) of every layer in order, on the device. Raises ValueError if the files do not fit."""
        if self._layers is None:
            network = self.load()
            with loading(self.name, self.head):
                state = read_weights(weights_file(self.head, self.head_file, self.head_revision))
            if set(state) != {f"layers.{place}.{part}" for place in PLACES for part in ("weight", "bias")}:
                raise ValueError(
                    f"the {self.name} reward's head {self.head} must have the linear layers {list(PLACES)}, got "
                    f"{sorted(state)}: a head with ReLU, or of another kind, is another function; name a linear one, "
                    "like sac+logos+ava1-l14-linearMSE.pth"
                )
            layers = [(state[f"layers.{n}.weight"].float(), state[f"layers.{n}.bias"].float()) for n in PLACES]
            width = int(network.config.projection_dim)
            if layers[0][0].shape[1] != width or layers[-1][0].shape[0] != 1:
                shapes = [list(weight.shape) for weight, _ in layers]
                raise ValueError(
                    f"the {self.name} reward's head {self.head} has layers {shapes}, which must lead from the {width} "
                    "numbers of the CLIP model's embedding to 1"
                )
            self._layers = [(weight.to(network.device), bias.to(network.device)) for weight, bias in layers]
        return self._layers


def _applied(layers: Sequence[Any], embeddings: "torch.Tensor") -> "torch.Tensor":
    from torch.nn import functional

    for weight, bias in layers:
        embeddings = functional.linear(embeddings, weight, bias)
    return embeddings[:, 0]
