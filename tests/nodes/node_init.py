"""First process of a pretended node: turns the namespaces in which it was started into a node, then waits for ever.

It is process 1 of its process namespace, so it must collect orphans, and all processes in there end with it. It uses
only the standard library, so that it starts at once and needs little memory.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

HOSTS = "127.0.0.1 localhost\n127.0.1.1 {name}\n"
"""/etc/hosts as Debian installs it: the node's own name means loopback, which other nodes cannot reach."""


def mount(source: str, target: str, *options: str) -> None:
    subprocess.run(["mount", *options, source, target], check=True)


def make_node(name: str, folder: Path, shm: str, scratch: str) -> None:
    """Gives the node its own hostname, /etc/hosts, /dev/shm and /tmp/ray; sizes of the last two are like `200m`."""
    socket.sethostname(name)
    mount("none", "/", "--make-rprivate")
    mount("proc", "/proc", "-t", "proc")
    (folder / "hosts").write_text(HOSTS.format(name=name))
    mount(str(folder / "hosts"), "/etc/hosts", "--bind")
    mount("shm", "/dev/shm", "-t", "tmpfs", "-o", f"size={shm}")
    Path("/tmp/ray").mkdir(exist_ok=True)
    mount("scratch", "/tmp/ray", "-t", "tmpfs", "-o", f"size={scratch}")


def main() -> None:
    if len(sys.argv) > 1:
        name, folder, shm, scratch = sys.argv[1:]
        make_node(name, Path(folder), shm, scratch)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.write(1, b"ready\n")
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.05)


main()
