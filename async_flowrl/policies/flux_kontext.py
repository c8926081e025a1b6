"""The model family FLUX.1-Kontext: FLUX.1, with the tokens of one edited image after the noise."""

from typing import Any, cast

from torch import Tensor

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies import flux


class FluxKontextPolicy(flux.FluxPolicy):
    family, title = "flux_kontext", "FLUX.1-Kontext"
    images = (1, 1)

    def _pixels(self, image: Any) -> Tensor:
        """Its size is the one of about 1024 × 1024 pixels for which the model was trained whose shape is nearest."""
        from diffusers.pipelines.flux import pipeline_flux_kontext as stock

        processor = self.whole("encode images").image_processor
        height, width = processor.get_default_height_width(image)
        shapes = ((abs(width / height - w / h), w, h) for w, h in stock.PREFERRED_KONTEXT_RESOLUTIONS)
        columns, rows = (side // self._side * self._side for side in min(shapes)[1:])
        return cast("Tensor", processor.preprocess(processor.resize(image, rows, columns), rows, columns))


class FluxKontextFamily(flux.FluxFamily):
    policy = FluxKontextPolicy
    pipeline = "FluxKontextPipeline"
    # The example of FluxKontextPipeline.__call__, diffusers 0.42.
    usual_guidance = 1.0, 2.5


def tiny_pipeline(config: TinyConfig) -> Any:
    # A latent has 16 pixels per side, not 8: so an image of 1024 × 1024 has 1,024 tokens.
    return flux.tiny_pipeline(config, "FluxKontextPipeline", widths=(8, 8, 8, 16, 16))
