"""The digest of the base weights on a GPU is that of the same weights in host memory."""

import pytest
import torch

from checkpoint_engine import base_digest
from checkpoint_engine.side_stream import PINNED_BLOCK_BYTES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_digest_does_not_depend_on_where_the_weights_are() -> None:
    wide = torch.arange(3 * PINNED_BLOCK_BYTES // 4 + 5, dtype=torch.float32)
    here = {"wide": wide, "turned": wide[:6].view(2, 3).t(), "scale": torch.tensor(0.5, dtype=torch.bfloat16)}
    there = {name: tensor.cuda() for name, tensor in here.items()}
    assert base_digest(there) == base_digest(here)
    assert base_digest(there, {"wide", "scale"}) == base_digest({name: here[name] for name in ("wide", "scale")})
    there["wide"][-1] += 1
    assert base_digest(there) != base_digest(here)
