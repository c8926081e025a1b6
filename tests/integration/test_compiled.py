"""Tests of ten steps with all blocks compiled, in the rollout worker and in the trainer."""

from pathlib import Path

import numpy as np
import pytest

from async_flowrl.cli.verify import verify
from tests.integration.runs import WHOLE, train_here_on_ray

COMPILED = ("trainer.compile=true", "rollout.compile=true")
TEN = (*WHOLE, "total_steps=10", "trainer.gradient_checkpointing=full")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ray_here")
def test_compiled_blocks_train_as_plain_ones(tmp_path: Path) -> None:
    """The closed loop holds, the run proves itself from its files, and only roundings tell it from a plain run."""
    plain = train_here_on_ray(tmp_path / "plain", "one_step_off", *TEN)
    compiled = train_here_on_ray(tmp_path / "compiled", "one_step_off", *TEN, *COMPILED)
    for run in (plain, compiled):
        assert run.column("staleness/max") == [0, *[1] * 9]
        assert len(set(run.digests)) == 11
        assert max(abs(gap) for gap in run.column("behaviour_gap")) < 1e-5
        assert run.column("log_prob_gap")[0] < 1e-5
    assert np.allclose(plain.column("reward/mean"), compiled.column("reward/mean"), atol=2e-3)
    assert np.ptp(plain.column("reward/mean")) > 0.01
    assert plain.digest != compiled.digest, "nothing was compiled: not even the last bits differ"
    assert all(holds for _, holds, _ in verify(compiled.root))
