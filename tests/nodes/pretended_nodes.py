"""Pretended nodes: Linux namespaces on this machine, joined by virtual cables and a switch.

Each node has its own network, hostname, processes, /dev/shm and /tmp/ray. All other files are shared, as on a cluster
with a shared file system. Nothing has a name outside the namespaces. One process per node holds its namespaces; it ends
with the process that started it, even by SIGKILL, and then the node's processes, cables and mounts are gone, too.
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

from tests.nodes.node_processes import COMMAND_SECONDS, end_tree, run, title

ROOT = Path(__file__).parents[2]
NETWORK, INTERFACE = "10.77.0", "eth1"
"""Prefix of the addresses by which nodes reach each other, and the name of their interface."""
OUTWARD = "10.0.2.15"
"""Address that every node has on eth0, as in virtual machines. eth0 has the default route and leads to no other
node."""
PORT = 6379
SIDE_BY_SIDE = 2
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
"""Ray's environment on the nodes. A silent node counts as dead after about 15 s, and a node or driver without its head
ends after 20 s; Ray's own limits are about 30 and 60 s."""


def obstacle() -> str | None:
    """Returns a sentence about why nodes cannot be pretended here; None if they can."""
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
    """Makes this process get SIGKILL when the thread that started it ends; called in a child before its program."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@dataclass
class Namespaces:
    """A process that holds namespaces; all processes in them end with it."""

    keeper: "subprocess.Popen[str]"
    pid: int
    """Pid of the first process inside, as seen from outside."""

    @classmethod
    def open(cls, kinds: Sequence[str], *arguments: str) -> "Namespaces":
        """Starts the process and returns its namespaces. Raises RuntimeError if it does not report that it is ready."""
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
        """Returns the command line that runs a command in the namespaces."""
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
    """A pretended machine. `seats` is pool → number of its workers for which the node has room; there are no GPUs."""

    name: str
    address: str
    folder: Path
    seats: Mapping[str, float]
    spaces: Namespaces
    switch: Namespaces
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, *command: str, stdout: Any = subprocess.PIPE, **environment: str) -> "subprocess.Popen[str]":
        """Starts a program on this node, in the folder /, so that it imports the installed code as Ray's workers do."""
        return subprocess.Popen(
            self.spaces.inside(*command),
            env={**os.environ, **RAY, "HF_HUB_OFFLINE": "1", **self.environment, **environment},
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str, seconds: float = COMMAND_SECONDS, **environment: str) -> str:
        """Runs a program and returns its output.

        Raises RuntimeError, with the output, if the program fails, and TimeoutExpired.
        """
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
        """Starts Ray on this node: as the head, or with `head` as a node of that head's cluster.

        Ray gives its raylet a limited time to report; if the machine is too busy for that, the start is tried again.
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
            "--object-store-memory=100000000",
            "--disable-usage-stats",
            seconds=START_SECONDS,
            RAY_AUTH_MODE="token",
        )

    def processes(self, name: str) -> list[psutil.Process]:
        """Returns the node's processes whose `title` begins with `name`, e.g. `raylet` or `ray::ProcessHost`."""
        found = psutil.Process(self.spaces.pid).children(recursive=True)
        return [process for process in found if title(process).startswith(name)]

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """Sends the signal `how` to every process of that name. Raises AssertionError if there is none."""
        victims = self.processes(name)
        assert victims, f"no {name} on {self.name}"
        for process in victims:
            process.send_signal(how)

    def unplug(self) -> None:
        """Disconnects the node's cable from the switch: the node keeps its addresses, but nothing arrives any more."""
        self.switch.ip("link", "set", self.name, "down")

    def plug(self) -> None:
        self.switch.ip("link", "set", self.name, "up")

    def power_off(self) -> None:
        """Ends all processes of the node at once."""
        self.spaces.close()


class Nodes:
    """A switch and the nodes connected to it. They end with the block, and with this process."""

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

    def add(self, seats: Mapping[str, float], **changes: Any) -> Node:
        """Adds and returns one more node, with its cable connected, without Ray."""
        assert self._switch is not None
        name = f"node{len(self.nodes) + 1}"
        folder = self.folder / name
        folder.mkdir(parents=True)
        kinds = ["net", "mount", "uts", "pid", "ipc"]
        spaces = Namespaces.open(kinds, name, str(folder), "160m", "200m")
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
        """Starts a Ray cluster over all nodes: the head first, then the others, SIDE_BY_SIDE at a time."""
        self.head.start_ray()
        with ThreadPoolExecutor(SIDE_BY_SIDE) as side_by_side:
            list(side_by_side.map(lambda node: node.start_ray(self.head), self.nodes[1:]))

    def close(self) -> None:
        for spaces in [node.spaces for node in self.nodes] + ([self._switch] if self._switch else []):
            spaces.close()
