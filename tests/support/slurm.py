"""A Slurm cluster for tests, on pretended nodes of this machine (tests/nodes/pretended_nodes.py).

It needs Debian's packages slurm-wlm and munge, and writes only into its own folder.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.nodes.pretended_nodes import Node, end_with_parent

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
PORTS = (6817, 6818)
"""Ports of slurmctld and of slurmd, on the nodes' own addresses."""
START_SECONDS = 60.0
CONFIGURATION = """\
ClusterName=pretended
SlurmctldHost={head}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5,bf_interval=5
ReturnToService=2
MpiDefault=none
KillWait=5
SlurmctldTimeout=30
SlurmdTimeout=60
MessageTimeout=30
JobRequeue=1
"""
"""The text of slurm.conf. It uses no cgroups, so that it works in a container without further rights."""


def obstacle() -> str | None:
    """Returns one sentence about why Slurm cannot run here; None if it can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"no {', '.join(missing)}: apt-get install slurm-wlm munge" if missing else None


class Slurm:
    """Context manager that runs slurmctld on the first node and slurmd on each; both end with the block."""

    def __init__(self, folder: Path, nodes: Sequence[Node], *, partition: str = "") -> None:
        self.folder, self.nodes, self._partition = folder, list(nodes), partition
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Slurm":
        (self.folder / "state").mkdir(parents=True)
        self._write()
        self._munge()
        head, *_ = self.nodes
        self._start(head, "slurmctld", "-D", "-i")
        for node in self.nodes:
            (self.folder / f"spool-{node.name}").mkdir()
            self._start(node, "slurmd", "-D", "-N", node.name)
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait(START_SECONDS)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}

    def run(self, *command: str, **environment: str) -> str:
        """Runs a command on the first node, with Slurm's environment, and returns its output."""
        return self.nodes[0].run(*command, **{**self.environment, **environment})

    def job(self, number: str) -> dict[str, str]:
        """Returns the fields of `scontrol show job` for a job: name → text."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _write(self) -> None:
        head = self.nodes[0]
        text = CONFIGURATION.format(head=head.name, address=head.address, folder=self.folder, ports=PORTS)
        cores = f"CPUs={os.cpu_count()} State=UNKNOWN"
        text += "".join(f"NodeName={node.name} NodeAddr={node.address} {cores}\n" for node in self.nodes)
        names = ",".join(node.name for node in self.nodes)
        text += f"PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP {self._partition}\n"
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _munge(self) -> None:
        """Starts one munged for all nodes, which reach it by its socket file, because they share all files."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        options = [f"--{name}={self.folder}/munge.{name.split('-')[0]}" for name in ("socket", "key-file", "pid-file")]
        options += [f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munge.seed"]
        command = [*self.nodes[0].spaces.inside("munged"), "--foreground", "--force", *options]
        self._daemons.append(self._popen(command))
        until = time.monotonic() + START_SECONDS
        while not (self.folder / "munge.socket").exists():
            assert time.monotonic() < until, (self.folder / "munged.log").read_text()
            time.sleep(0.1)

    def _start(self, node: Node, *command: str) -> None:
        self._daemons.append(self._popen(node.spaces.inside(*command)))

    def _popen(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        with (self.folder / "daemons.log").open("ab") as log:
            return subprocess.Popen(
                command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def _wait(self) -> None:
        """Waits until every node is idle. Raises AssertionError, with the daemons' logs, after START_SECONDS."""
        until, said = time.monotonic() + START_SECONDS, ""
        while time.monotonic() < until:
            said = self.run("sh", "-c", "sinfo --noheader --format='%T %D' || true")
            if said.split() == ["idle", str(len(self.nodes))]:
                return
            time.sleep(0.5)
        logs = "\n".join(log.read_text()[-2000:] for log in self.folder.glob("*.log"))
        raise AssertionError(f"Slurm has not started: {said}\n{logs}")
