"""Tests of gloo's network interface: the one on the way to the peer, not the one of the machine's own name."""

import psutil
import pytest

from checkpoint_engine.process_group import address_towards
from separation.rendezvous import interface_towards


def test_the_way_to_oneself_is_the_interface_that_has_the_address() -> None:
    assert interface_towards("127.0.0.1") == "lo" and address_towards("127.0.0.1", 1) == "127.0.0.1"
    for name, addresses in psutil.net_if_addrs().items():
        for own in (each.address for each in addresses if each.family.name == "AF_INET"):
            assert interface_towards(own) == name and address_towards(own, 1) == own


def test_a_peer_that_is_nowhere_leaves_the_choice_to_gloo() -> None:
    assert interface_towards("no-such-host.invalid") is None
    with pytest.raises(OSError, match=r"."):
        address_towards("no-such-host.invalid", 1)
