"""Test of the bytes that leave the trainer's node for 1, 2, 4 and 8 receivers on other nodes: not one copy for each."""

import json
import sys
from collections.abc import Callable

import pytest

from tests.nodes.pretended_nodes import Nodes

pytestmark = [pytest.mark.nodes, pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(3000)]

MEGABYTES = 10
SECONDS = 1800.0
MOST = {"object_store": {1: 1, 2: 2, 4: 2, 8: 2}, "gloo": {1: 1, 2: 2, 4: 3, 8: 4}}
"""Transport → number of receivers → largest number of copies that may leave. The tree of the object store sends at most
two; gloo's broadcast, a binomial tree, sends one for each of its levels."""
OVERHEAD = 0.25
"""Allowed share of a copy for packet headers, acknowledgements, calls, and Ray's other messages to its head."""


def test_bytes_out_of_the_senders_node_do_not_grow_with_the_receivers(ray_nodes: Callable[..., Nodes]) -> None:
    nodes = ray_nodes(*({} for _ in range(10)))
    command = (sys.executable, "-m", "benchmarks.delivery.fan_out", f"--megabytes={MEGABYTES}")
    said = nodes.head.run(*command, f"--address={nodes.ray_address}", seconds=SECONDS, RAY_AUTH_MODE="token")
    sys.stdout.write(said)
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [(each["transport"], each["receivers"]) for each in found] == [
        (transport, count) for transport in MOST for count in (1, 2, 4, 8)
    ]
    for each in found:
        most = MOST[each["transport"]][each["receivers"]]
        assert 0.9 < each["copies"] <= most * (1 + OVERHEAD) + OVERHEAD, each
        assert each["fallbacks"] == each["member_busy"] == 0
