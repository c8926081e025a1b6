"""CLIP (Radford et al. 2021) as rewards use it: embeddings of images and of a prompt, from transformers' CLIPModel."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from PIL import Image

from async_flowrl.rewards.device import check_model_options, choose_device
from async_flowrl.rewards.weights import check_path, loading
from async_flowrl.types import ByteArray

if TYPE_CHECKING:
    import torch

MAX_TOKENS = 77
"""What CLIP's text encoder takes; longer prompts are cut, the end token stays."""

VIT_H, VIT_L = (3.68, 0.0202), (1.60, 0.0163)
"""GiB of ViT-H/14's and ViT-L/14's weights in float32, and of what passes for each image of a batch."""
PUBLISHED = {
    "yuvalkirstain/PickScore_v1": VIT_H,
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": VIT_H,
    "openai/clip-vit-large-patch14": VIT_L,
}


def memory_gib(model: str, *, batch_size: int = 16, device: str = "auto", **_: Any) -> float | None:
    """GiB of device memory that a CLIP model takes while it embeds a batch; None for one whose size is not known."""
    if model not in PUBLISHED:
        return None
    weights, image = PUBLISHED[model]
    return 0.0 if device == "cpu" else weights + batch_size * image


@dataclass(frozen=True)
class Loaded:
    """`model` is a CLIPModel on `device` in float32, `images` makes its pixels of pictures, `tokenizer` its ids."""

    model: Any
    images: Callable[[ByteArray], "torch.Tensor"]
    tokenizer: Any
    device: "torch.device"


@dataclass
class Clip:
    """A CLIP model for one reward, loaded with the first call, from a local folder or the hub: safetensors, no code of
    the repository's. `processor` is where tokenizer and preparation of images come from, `model` if None."""

    reward: str
    """Its name, for messages."""
    model: str
    processor: str | None = None
    revision: str | None = None
    """Of `model`, and of `processor` where that is the same: a commit of the hub."""
    batch_size: int = 16
    device: str = "auto"
    build: Callable[[], Any] | None = None
    """Makes the CLIPModel, where it is made in another way than from the files of `model`."""
    pixels: Callable[[ByteArray, int], "torch.Tensor"] | None = None
    """Makes float32 [b, 3, size, size] of images uint8 [b, H, W, 3], where the processor's way is not the model's."""
    processor_revision: str | None = None
    """Of `processor`, where that is another repository."""
    _loaded: Loaded | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_model_options(self.reward, device=self.device, batch_size=self.batch_size)

    def check(self) -> None:
        """Raises ValueError for a local path that does not exist. Loads nothing."""
        check_path(self.reward, "model", self.model)
        check_path(self.reward, "processor", self.processor or self.model)

    def image_embeddings(self, images: ByteArray) -> Iterator["torch.Tensor"]:
        """Of images uint8 [n, H, W, 3], in batches: float32 [b, d] of length 1, on the device."""
        loaded = self.load()
        for start in range(0, len(images), self.batch_size):
            pixels = loaded.images(images[start : start + self.batch_size]).to(loaded.device)
            yield _unit(loaded.model.get_image_features(pixel_values=pixels))

    def text_embedding(self, text: str) -> "torch.Tensor":
        """Of a prompt: float32 [d] of length 1, on the device."""
        loaded = self.load()
        tokens = loaded.tokenizer(text, truncation=True, max_length=MAX_TOKENS, return_tensors="pt").to(loaded.device)
        return _unit(loaded.model.get_text_features(**tokens))[0]

    def cosines(self, images: ByteArray, text: str) -> list[float]:
        """cos(image, text) of every image."""
        import torch

        with torch.inference_mode():
            prompt = self.text_embedding(text)
            return [float(x) for batch in self.image_embeddings(images) for x in (batch @ prompt).double().cpu()]

    def load(self) -> Loaded:
        """Loads what has not been loaded. Raises ValueError where files are missing, or a GPU that is asked for."""
        if self._loaded is None:
            from async_flowrl.policies.loading import ONE_AT_A_TIME

            with ONE_AT_A_TIME:
                self._loaded = self._load()
        return self._loaded

    def _load(self) -> Loaded:
        from transformers import CLIPImageProcessorPil, CLIPTokenizer

        from async_flowrl.policies.loading import settle

        device, source = choose_device(self.reward, self.device), self.processor or self.model
        revision = self.revision if source == self.model else self.processor_revision
        with loading(self.reward, source):
            # The PIL one by name: CLIPProcessor takes one that rounds differently where torchvision is installed.
            prepare = CLIPImageProcessorPil.from_pretrained(source, revision=revision)
            tokenizer = CLIPTokenizer.from_pretrained(source, revision=revision)
        with loading(self.reward, self.model):
            model = self.build() if self.build else _from_files(self)
        settle(model, device)
        return Loaded(model, self._own_pixels(model) or _pixels(prepare), tokenizer, device)

    def _own_pixels(self, model: Any) -> Callable[[ByteArray], "torch.Tensor"] | None:
        if (pixels := self.pixels) is None:
            return None
        size = int(model.config.vision_config.image_size)
        return lambda images: pixels(images, size)

    def logit_scale(self) -> float:
        """exp of the model's own temperature, about 100."""
        return float(self.load().model.logit_scale.detach().double().exp())


def _from_files(clip: Clip) -> Any:
    import torch
    from transformers import CLIPModel

    options = {"revision": clip.revision, "use_safetensors": True, "trust_remote_code": False}
    return CLIPModel.from_pretrained(clip.model, dtype=torch.float32, **options)


def _pixels(prepare: Any) -> Callable[[ByteArray], "torch.Tensor"]:
    """Shortest side to the model's size (bicubic), middle cut out, normalised: float32 [b, 3, h, w]."""

    def pixels(images: ByteArray) -> "torch.Tensor":
        made: torch.Tensor = prepare([Image.fromarray(image) for image in images], return_tensors="pt")["pixel_values"]
        return made

    return pixels


def _unit(features: Any) -> "torch.Tensor":
    """Vectors of length 1 from what `get_image_features` and `get_text_features` return."""
    vectors: torch.Tensor = getattr(features, "pooler_output", features)
    unit: torch.Tensor = vectors / vectors.norm(dim=-1, keepdim=True)
    return unit
