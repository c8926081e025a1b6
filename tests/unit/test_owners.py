"""Tests of the distribution of the parts of a step's groups over trainer ranks."""

from collections import Counter
from dataclasses import replace

import pytest

from async_flowrl.controller.replicas import Assignment
from async_flowrl.training.messages import GroupMeta
from async_flowrl.training.parts import World, cut, parts_of, tickets_for
from async_flowrl.types import Sampling

SAMPLING = Sampling(32, 4, 1.0, None, " ", "sde", 0.7)


def spread(ranks: int, groups: int, parts: int, per_replica: int = 1) -> list[tuple[int, ...]]:
    owners = Assignment(ranks, per_replica)
    owners.begin(groups)
    return [owners.assign([1] * parts) for _ in range(groups)]


def test_whole_groups_where_every_replica_gets_two_and_split_ones_where_there_are_few() -> None:
    found = spread(3, 7, 2)
    assert all(len(set(of_group)) == 1 for of_group in found)
    assert sorted(Counter(owner for of_group in found for owner in of_group).values()) == [4, 4, 6]
    assert spread(4, 1, 8) == [(0, 1, 2, 3, 0, 1, 2, 3)]
    counts = Counter(owner for of_group in spread(3, 5, 2) for owner in of_group)
    assert sorted(counts.values()) == [3, 3, 4]


def test_who_has_less_left_comes_before_who_had_less() -> None:
    owners = Assignment(2)
    owners.begin(9)
    assert owners.assign([5]) == (0,) and owners.assign([1]) == (1,)
    owners.computed(0, 5)
    assert owners.assign([1]) == (0,), "it has nothing left"
    owners.computed(0, 1)
    owners.computed(1, 1)
    assert owners.assign([1]) == (1,), "both have nothing left, and it had less"


def test_a_rank_is_sent_the_tickets_of_its_parts_alone() -> None:
    """Of four images in two tickets: parts of one image on ranks 0 and 1; a rank without any repeats another's."""
    given = replace(meta(3, (0, 1, 1)), advantages=(1.0,) * 4, parts=((3,), (0,), (1,)), tickets=2)
    for per_replica, expected in ((1, [((1,),), ((0,),), ((),)]), (3, [((1,),), ((0,),), ((0,),)])):
        assert [tickets_for([given], World(rank, 3, per_replica)) for rank in range(3)] == expected
    repeated = [part.part for part in parts_of([given], World(0, 3, 3)) if not part.counts]
    assert repeated == [0], "its own last one, which it has already"


def meta(group: int, owners: tuple[int, ...]) -> GroupMeta:
    images = tuple(range(2 * len(owners)))
    return GroupMeta(group, 1, 0, 0, tuple(1.0 for _ in images), cut(images, 2), images, " ", SAMPLING, owners=owners)


@pytest.mark.parametrize("per_replica", [1, 2, 4])
def test_every_part_is_trained_once_and_a_replica_in_step(per_replica: int) -> None:
    owners = Assignment(4, per_replica)
    owners.begin(7)
    metas = [meta(group, owners.assign([2, 2])) for group in range(7)]
    by_rank = [parts_of(metas, World(rank, 4, per_replica)) for rank in range(4)]
    counted = [(part.group, part.part) for parts in by_rank for part in parts if part.counts]
    assert sorted(counted) == [(group, part) for group in range(7) for part in range(2)]
    for rank, parts in enumerate(by_rank):
        assert len(parts) == max(len(by_rank[other]) for other in World(rank, 4, per_replica).replica)
        assert per_replica > 1 or all(part.counts for part in parts)
