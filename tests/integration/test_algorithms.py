"""Tests of every algorithm in a whole run: the reward rises."""

from pathlib import Path

import pytest

from async_flowrl.config.paths import config_dir
from tests.integration.runs import LOCAL, WHOLE, Run, train

ALGORITHMS = sorted(path.stem for path in (config_dir() / "algorithm").glob("*.yaml"))
OWN = "+reward.terms={brightness: {name: 'tests.integration.brightness:brightness'}}"
OTHERWISE = {
    "flow_grpo": ("total_steps=3",),
    "mix_grpo": ("total_steps=3",),
    "diffusion_nft": ("trainer.learning_rate=0.02", "rollout.num_inference_steps=4", "algorithm.beta=0.1"),
    "dgpo": ("trainer.learning_rate=0.02",),
    "crd": ("algorithm.kl_coef=0.001",),
}
"""Where the settings of `follow` are more than enough, or too few. DiffusionNFT trains every noise level, and follows
its reward sooner with a small beta."""
MOVED = 0.01
"""Change of held-out brightness (0..1) in so many steps."""


FOLLOW = ("flow_grpo", "diffusion_nft")
"""One of each kind: every step trained by its log-probs, and no log-probs at all.

The others differ from the first in their loss, in the steps that they train, or in their transitions; referees check
their losses and gradients (tests/unit/algorithms). Further files, named like one of these, are other settings of it.
direct_align takes the gradient of its reward, and has a test of its own below.
"""
OTHERS = [name for name in ALGORITHMS if not name.startswith((*FOLLOW, "direct_align"))]


def follow(folder: Path, algorithm: str, *overrides: str) -> Run:
    return train(
        folder,
        "one_step_off",
        f"algorithm={algorithm}",
        *WHOLE,
        "~reward.terms.color",
        OWN,
        "total_steps=4",
        "group_size=8",
        "trainer.micro_batch_size=8",
        "trainer.learning_rate=0.04",
        "trainer.eps=1e-15",
        "evaluate.before_training=true",
        "evaluate.images_per_prompt=3",
        *OTHERWISE.get(algorithm, ()),
        *overrides,
    )


def gain(run: Run) -> float:
    """How much brighter the held-out images became."""
    return float(run.metrics[-1]["evaluation/reward/mean"] - run.metrics[0]["evaluation_before/reward/mean"])


@pytest.mark.extended
@pytest.mark.parametrize("algorithm", [*FOLLOW, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_the_policy_follows_its_reward(algorithm: str, tmp_path: Path) -> None:
    run = follow(tmp_path / "run", algorithm)
    assert run.column("staleness/max") == [min(step, 1) for step in range(len(run.metrics))]
    assert gain(run) > MOVED


@pytest.mark.parametrize("negated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_policy_follows_the_gradient_of_its_reward(negated: bool, tmp_path: Path) -> None:
    """One image per prompt, through the VAE; with a negated reward images get darker."""
    own = "reward.terms.brightness.name='tests.integration.brightness:DifferentiableBrightness'"
    alone = ("group_size=1", "trainer.micro_batch_size=1", "trainer.learning_rate=0.03")
    run = follow(tmp_path / "run", "direct_align", own, *alone, f"algorithm.negate_reward={negated}")
    assert gain(run) < -MOVED if negated else gain(run) > MOVED


@pytest.mark.extended
def test_stale_samples_are_corrected_under_the_weights_that_made_them(tmp_path: Path) -> None:
    """What the trainer recomputes under the retained adapter is what the rollout saw, two versions later too."""
    settings = ("algorithm=flow_grpo", "algorithm.correction=rollout_tis", "total_steps=4")
    run = train(tmp_path / "run", "fully_async", *settings)
    assert run.column("staleness/max") == [0, 1, 2, 2]
    assert max(run.column("behaviour_gap")) < 1e-6
    assert run.column("log_prob_gap")[-1] > 1e-6


@pytest.mark.extended
def test_a_loss_of_whole_groups_gets_them_whole_from_the_controller(tmp_path: Path) -> None:
    """DGPO's weight of a group is the same whether its images are one part or four; each part's own would differ."""
    settings = ("algorithm=dgpo", *LOCAL, "total_steps=3", "trainer.learning_rate=0.02", "trainer.eps=1e-15")
    cut, whole = (train(tmp_path / size, "sync", *settings, f"trainer.micro_batch_size={size}") for size in "14")
    weights = whole.column("preference_weight")
    assert cut.column("preference_weight") == pytest.approx(weights, rel=1e-3)
    assert weights[0] == 0.5 and abs(weights[2] - 0.5) > 0.05
