"""Machines pretended on this one: Linux namespaces, joined by virtual cables and a switch.

Each node has its own network, hostname, processes, /dev/shm and /tmp/ray; files are shared but for these, as on a
cluster with a shared file system. Nothing is given a name outside its namespaces: everything is held by one process per
node, which ends with the process that started it, by SIGKILL too, and takes processes, cables and mounts with it.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
NETWORK, INTERFACE = "10.77.0", "eth1"
"""Addresses that nodes have for each other, and where."""
OUTWARD = "10.0.2.15"
"""Every node's address on eth0, which has the default route and leads to no other node: so virtual machines have it."""
PORT = 6379
SIDE_BY_SIDE = 2
COMMAND_SECONDS = 60.0
START_SECONDS, START_ATTEMPTS = 180.0, 3
RAY_COMMAND = str(Path(sys.executable).with_name("ray"))
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_TOKEN": "0" * 64,
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "6",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
}
"""A silent node counts as dead after some 15 s; a node or driver without its head ends after 20 s. Ray's own are about
30 and 60."""


def obstacle() -> str | None:
    """Why no nodes can be pretended here, in a sentence; None where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "nodes are pretended by Linux namespaces, which needs root"
    missing = [tool for tool in ("ip", "tc", "ss", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if missing:
        return f"nodes are pretended with {' and '.join(missing)}: apt-get install iproute2 util-linux"
    make = "ip link add v1 type veth peer name v2 && ip link add v3 type bridge && mount -t tmpfs none /dev/shm"
    make += " && mount --make-rprivate none / && mount -t proc proc /proc"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--ipc", "--fork", "sh", "-c", make],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        return f"namespaces with virtual cables are not allowed here: {tried.stderr.strip().partition(chr(10))[0]}"
    return None


def end_with_parent() -> None:
    """In a child before its program starts: SIGKILL when the thread that started it ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@dataclass
class Namespaces:
    """A process that holds namespaces; with it ends whatever is in them."""

    keeper: "subprocess.Popen[str]"
    pid: int
    """Of the first process inside, as it is known outside."""

    @classmethod
    def open(cls, kinds: Sequence[str], *arguments: str) -> "Namespaces":
        """Raises RuntimeError where the first process does not get as far as it should."""
        flags = [f"--{kind}" for kind in kinds]
        program = [sys.executable, "-S", str(Path(__file__).with_name("node_init.py")), *arguments]
        keeper = subprocess.Popen(
            ["unshare", *flags, "--fork", "--kill-child", *program],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        assert keeper.stdout is not None
        if keeper.stdout.readline() != "ready\n":
            keeper.kill()
            raise RuntimeError(f"no namespaces for {arguments or 'the switch'}")
        return cls(keeper, psutil.Process(keeper.pid).children()[0].pid)

    def inside(self, *command: str, kinds: str = "-a") -> list[str]:
        """The command, to be run in the namespaces."""
        return ["nsenter", "-t", str(self.pid), kinds, "--", *command]

    def ip(self, *words: str) -> None:
        run(self.inside("ip", *words, kinds="-n"))

    def close(self) -> None:
        self.keeper.kill()
        self.keeper.wait(COMMAND_SECONDS)
        if self.keeper.stdout is not None:
            self.keeper.stdout.close()


@dataclass
class Node:
    """A pretended machine. `seats` are workers of a pool that may sit there, where there is no GPU."""

    name: str
    address: str
    folder: Path
    seats: Mapping[str, float]
    spaces: Namespaces
    switch: Namespaces
    store_bytes: int = 100_000_000
    environment: Mapping[str, str] = field(default_factory=dict)
    ray_options: Sequence[str] = ()
    """More words for `ray start`."""

    def start(self, *command: str, stdout: Any = subprocess.PIPE, **environment: str) -> "subprocess.Popen[str]":
        """A program on this node, in the folder /: it finds the code that is installed, as Ray's workers do."""
        return subprocess.Popen(
            self.spaces.inside(*command),
            env={**os.environ, **RAY, "HF_HUB_OFFLINE": "1", **self.environment, **environment},
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str, seconds: float = COMMAND_SECONDS, **environment: str) -> str:
        """What a program prints that ends well. Raises RuntimeError with it otherwise, or TimeoutExpired."""
        process = self.start(*command, **environment)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end_tree(process)
            raise
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} on {self.name} ended with {process.returncode}:\n{output}")
        return output

    def start_ray(self, head: "Node | None" = None) -> None:
        """A raylet on this node; with `head`, of that one's cluster, else as the head.

        Ray gives a raylet 30 s to announce itself; where the machine is too busy for that, it is tried again.
        """
        for left in reversed(range(START_ATTEMPTS)):
            try:
                return self._start_ray(head)
            except RuntimeError as error:
                if left == 0 or "timed out during startup" not in str(error):
                    raise
                self.run(RAY_COMMAND, "stop", "--force", seconds=START_SECONDS)
        raise AssertionError("unreachable")

    def _start_ray(self, head: "Node | None") -> None:
        where = [f"--address={head.address}:{PORT}"] if head else ["--head", f"--port={PORT}"]
        if head is None:
            where.append("--include-dashboard=false")
        self.run(
            RAY_COMMAND,
            "start",
            *where,
            f"--node-ip-address={self.address}",
            f"--node-name={self.name}",
            "--num-cpus=6",
            f"--resources={json.dumps(dict(self.seats))}",
            f"--object-store-memory={self.store_bytes}",
            "--disable-usage-stats",
            *self.ray_options,
            seconds=START_SECONDS,
            RAY_AUTH_MODE="token",
        )

    def processes(self, name: str) -> list[psutil.Process]:
        """Those of the node whose program or title begins so: `raylet`, `ray::ProcessHost`."""
        found = psutil.Process(self.spaces.pid).children(recursive=True)
        return [process for process in found if title(process).startswith(name)]

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """The signal `how` to every process of that name. Raises AssertionError where there is none."""
        victims = self.processes(name)
        assert victims, f"no {name} on {self.name}"
        for process in victims:
            process.send_signal(how)

    def unplug(self) -> None:
        """Pulls the cable out of the switch: the node keeps its addresses, nothing arrives, nobody is told."""
        self.switch.ip("link", "set", self.name, "down")

    def plug(self) -> None:
        self.switch.ip("link", "set", self.name, "up")

    def slow_down(self, rate: str) -> None:
        """What the node sends goes at this rate (`20mbit`), by a token bucket filter."""
        shape = ["tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf"]
        run(self.spaces.inside(*shape, "rate", rate, "burst", "64kb", "latency", "400ms", kinds="-n"))

    def power_off(self) -> None:
        """The whole machine, at once."""
        self.spaces.close()


class Nodes:
    """A switch and the nodes at it. Leaving the block ends them; so does the end of this process."""

    def __init__(self, folder: Path, seats: Sequence[Mapping[str, float]], **each: Any) -> None:
        self.folder, self._seats, self._each = folder, seats, each
        self.nodes: list[Node] = []
        self._switch: Namespaces | None = None

    def __enter__(self) -> "Nodes":
        try:
            self._switch = Namespaces.open(["net"])
            self._switch.ip("link", "add", "bridge", "type", "bridge")
            self._switch.ip("link", "set", "bridge", "up")
            for seats in self._seats:
                self.add(seats)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def ray_address(self) -> str:
        return f"{self.head.address}:{PORT}"

    def add(self, seats: Mapping[str, float], *, shm: str = "160m", scratch: str = "200m", **changes: Any) -> Node:
        """One more node, with its cable plugged in, without Ray."""
        assert self._switch is not None
        name = f"node{len(self.nodes) + 1}"
        folder = self.folder / name
        folder.mkdir(parents=True)
        kinds = ["net", "mount", "uts", "pid", "ipc"]
        spaces = Namespaces.open(kinds, name, str(folder), shm, scratch)
        address = f"{NETWORK}.{len(self.nodes) + 1}"
        node = Node(name, address, folder, seats, spaces, self._switch, **{**self._each, **changes})
        self.nodes.append(node)
        for outside, inside, own in ((f"{name}-nat", "eth0", OUTWARD), (name, INTERFACE, address)):
            cable = ["type", "veth", "peer", "name", inside, "netns", str(spaces.pid)]
            self._switch.ip("link", "add", outside, *cable)
            self._switch.ip("link", "set", outside, "up")
            spaces.ip("address", "add", f"{own}/24", "dev", inside)
            spaces.ip("link", "set", inside, "up")
        self._switch.ip("link", "set", name, "master", "bridge")
        spaces.ip("route", "add", "default", "dev", "eth0")
        return node

    def start_ray(self) -> None:
        """A Ray cluster over all nodes: the head first, then the others, a few at a time."""
        self.head.start_ray()
        with ThreadPoolExecutor(SIDE_BY_SIDE) as side_by_side:
            list(side_by_side.map(lambda node: node.start_ray(self.head), self.nodes[1:]))

    def close(self) -> None:
        for spaces in [node.spaces for node in self.nodes] + ([self._switch] if self._switch else []):
            spaces.close()


def run(command: Sequence[str]) -> None:
    """Raises RuntimeError with what the command says when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def title(process: psutil.Process) -> str:
    """What a process calls itself (its command line, of which Ray's workers make a title), by its last path part."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return ""
    return Path(words[0]).name if words and words[0].startswith("/") else " ".join(words)


def end_tree(process: "subprocess.Popen[str]") -> None:
    """Ends a program and what it started."""
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.kill()
    process.wait(COMMAND_SECONDS)
