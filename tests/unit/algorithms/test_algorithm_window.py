"""Tests of windows: their support, their frequencies, that they depend on nothing else, and refusals."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from async_flowrl.algorithms.window import Window, check_window, draw_window, rows_per_image
from async_flowrl.config.schema import AlgorithmConfig

T = 10


def draw(config: AlgorithmConfig, *, step: int = 0, group: int = 0, seed: int = 0) -> Window:
    return draw_window(config, num_inference_steps=T, seed=seed, step=step, group=group)


def test_windows_are_drawn_per_group_or_per_step() -> None:
    config = AlgorithmConfig(window="random", sde_window_size=2)
    per_group = [draw(config, group=group) for group in range(40)]
    assert {window.train_steps for window in per_group} == {(first, first + 1) for first in range(T - 2)}
    assert all(window.noise_steps == window.train_steps for window in per_group)
    ranged = replace(config, sde_window_range=(2, 5))
    assert {draw(ranged, group=group).train_steps for group in range(40)} == {(2, 3), (3, 4)}
    assert draw(AlgorithmConfig(window="list", window_list=[4, 1])).train_steps == (1, 4)
    for shared in (replace(config, window_per="step"), replace(config, global_std=True)):
        assert len({draw(shared, group=group) for group in range(40)}) == 1
        assert len({draw(shared, step=step) for step in range(40)}) > 3
    levels = AlgorithmConfig(name="diffusion_nft", timestep_range=(0, 8), window_per="step")
    assert len({draw(levels, group=group) for group in range(40)}) == 1


def test_draws_depend_on_seed_step_and_group_alone() -> None:
    config = AlgorithmConfig(window="random", sde_window_size=2)
    draws = {(s, t, g): draw(config, seed=s, step=t, group=g) for s in range(4) for t in range(4) for g in range(4)}
    for (s, t, g), window in reversed(draws.items()):
        assert draw(config, seed=s, step=t, group=g) == window
    assert len({tuple(draws[s, t, 0] for t in range(4)) for s in range(4)}) > 1


def test_sliding_window_moves_by_one_and_rolls_over() -> None:
    config = AlgorithmConfig(window="sliding", sde_window_size=4, window_interval=25)
    starts = [draw(config, step=25 * move, group=move).train_steps[0] for move in range(8)]
    assert starts == [0, 1, 2, 3, 4, 5, 0, 1]
    assert len({draw(config, step=step) for step in range(25)}) == 1 and draw(config, step=24) != draw(config, step=25)
    assert draw(config, step=125).train_steps == (5, 6, 7, 8)


def mix_grpo_starts(decay: str, *, updates: int, steps: int, longest: int, least: int) -> list[int]:
    """The published loop, update by update: an iteration counter that is compared with a shrinking limit."""
    starts, place, inside = [], 0, 0
    for _ in range(updates):
        starts.append(place)
        inside += 1
        limit: float = max(least, int(longest * (1 - place / (steps - 2)) + least * place / (steps - 2)))
        if decay == "exponential":
            limit = math.ceil(longest * math.exp(-0.1 * max(0, place - 13)))
        if inside >= limit:
            inside, place = 0, place + 1
        if place > steps - 1 - 4:
            place = 0
    return starts


@pytest.mark.parametrize(("decay", "longest", "least"), [("linear", 10, 1), ("linear", 9, 4), ("exponential", 5, 1)])
def test_the_interval_of_a_sliding_window_decays_as_published(decay: str, longest: int, least: int) -> None:
    config = AlgorithmConfig(
        window="sliding", sde_window_size=4, window_decay=decay, window_interval=longest, window_interval_min=least
    )
    ours = [
        draw_window(config, num_inference_steps=25, seed=0, step=step, group=0).train_steps[0] for step in range(400)
    ]
    assert ours == mix_grpo_starts(decay, updates=400, steps=25, longest=longest, least=least)
    constant = replace(config, window_decay="none")
    assert ours != [
        draw_window(constant, num_inference_steps=25, seed=0, step=step, group=0).train_steps[0] for step in range(400)
    ]


def test_fraction_keeps_noise_everywhere_and_trains_a_random_share() -> None:
    config = AlgorithmConfig(window="fraction", timestep_fraction=0.6)
    counts: Counter[int] = Counter()
    for step in range(3000):
        window = draw(config, step=step)
        assert window.noise_steps == tuple(range(9)) and len(window.train_steps) == 5
        counts.update(window.train_steps)
    assert set(counts) == set(range(9))
    assert all(abs(count - 3000 * 5 / 9) < 5 * (3000 * 20 / 81) ** 0.5 for count in counts.values())


@pytest.mark.parametrize(("name", "fraction", "rows"), [("diffusion_nft", 1.0, 10), ("dpo", 0.3, 3), ("dpo", 0.01, 1)])
def test_final_image_algorithms_sample_without_noise(name: str, fraction: float, rows: int) -> None:
    config = AlgorithmConfig(name=name, timestep_fraction=fraction)
    assert rows_per_image(config, T) == rows
    counts: Counter[int] = Counter()
    for step in range(2000):
        window = draw(config, step=step)
        assert window.noise_steps == () and len(window.train_steps) == rows
        counts.update(window.train_steps)
    share = rows / T
    assert all(abs(counts[level] - 2000 * share) <= 5 * (2000 * share * (1 - share)) ** 0.5 for level in range(T))


def test_final_images_are_trained_at_levels_of_the_range_alone() -> None:
    whole = AlgorithmConfig(name="diffusion_nft", timestep_range=(1, 4))
    assert {draw(whole, step=step).train_steps for step in range(20)} == {(1, 2, 3)}
    share = replace(whole, timestep_fraction=0.7)
    assert rows_per_image(share, T) == 2
    assert {draw(share, step=step).train_steps for step in range(60)} == {(1, 2), (1, 3), (2, 3)}
    everything = AlgorithmConfig(name="diffusion_nft", timestep_fraction=0.6)
    named = replace(everything, timestep_range=(0, T))
    assert all(draw(everything, step=step) == draw(named, step=step) for step in range(20))


def test_stratified_levels_are_one_of_each_equal_part() -> None:
    config = AlgorithmConfig(name="vgrpo", timestep_stratified=True, timestep_fraction=0.4, timestep_range=(1, 11))
    drawn = [draw_window(config, num_inference_steps=11, seed=0, step=s, group=0).train_steps for s in range(60)]
    assert all(1 <= a <= 2 < b <= 5 < c <= 7 < d <= 10 for a, b, c, d in drawn)
    assert [len({steps[part] for steps in drawn}) for part in range(4)] == [2, 3, 2, 3]


@pytest.mark.parametrize("fields", [{"sde_window_range": (1, 3)}, {"window": "list", "window_list": [0, 2]}])
def test_a_window_that_is_too_large_is_told_with_the_key_that_bounds_it(fields: dict[str, Any]) -> None:
    config = AlgorithmConfig(**{"window": "sliding", "sde_window_size": 4, **fields})
    with pytest.raises(ValueError, match=rf"sde_window_size must be in 1\.\.2 .*algorithm\.{list(fields)[-1]}=\["):
        check_window(config, 9)
