"""Tests of base weights that only the first rank reads and streams to the others, against direct loading."""

from pathlib import Path

import pytest
import torch

from async_flowrl.training.rank_model import base_tensors
from checkpoint_engine import base_digest
from tests.support.families import NAMES, policy_of
from tests.unit.training.base_weights_ranks import streamed

pytestmark = pytest.mark.serial("runs")


EVERY = [(family, dtype) for family in NAMES for dtype in ("bfloat16", "float32")]
"""Every family in both dtypes."""
CASES = [("qwen_image", "bfloat16"), ("qwen_image", "float32"), ("wan", "bfloat16")]
"""One family in both dtypes, and the one that keeps small tensors in float32."""


@pytest.mark.parametrize("cases", [CASES, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some", "every"])
def test_both_ranks_hold_what_direct_loading_gives(cases: list[tuple[str, str]], tmp_path: Path) -> None:
    """Bit for bit, in shards, with room for little more than half of the model and two tensors."""
    ranks = streamed(cases, tmp_path)
    for family, dtype in cases:
        direct = policy_of(family, parts="transformer", dtype=dtype).transformer
        expected = base_tensors(direct)
        for rank in ranks:
            found = rank[family, dtype]["tensors"]
            assert found.keys() == expected.keys()
            wrong = [name for name in found if not torch.equal(found[name], expected[name])]
            assert wrong == []
            assert [name for name in found if found[name].dtype != expected[name].dtype] == []
            assert rank[family, dtype]["sharded"] == len(list(direct.parameters()))
        assert ranks[0][family, dtype]["digest"] == base_digest(dict(direct.named_parameters()))
        assert ranks[1][family, dtype]["digest"] == ""
        sizes = sorted(t.numel() * t.element_size() for t in expected.values())
        # A thread of gloo may let go of a tensor only after the next one was made.
        assert ranks[1][family, dtype]["peak"] < 0.6 * sum(sizes) + sum(sizes[-2:])
