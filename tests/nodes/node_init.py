"""First process of a pretended node: makes the namespaces that it was started in a node, then waits for ever.

As process 1 of its process namespace it collects whatever is orphaned there, and all of that ends with it. Only the
standard library: it starts in a moment, and costs next to nothing.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

HOSTS = "127.0.0.1 localhost\n127.0.1.1 {name}\n"
"""As Debian installs it: the node's own name means loopback, which nobody else can reach."""


def mount(source: str, target: str, *options: str) -> None:
    subprocess.run(["mount", *options, source, target], check=True)


def make_node(name: str, folder: Path, shm: str, scratch: str) -> None:
    """A hostname, /etc/hosts, /dev/shm and /tmp/ray of its own, the last two of the given sizes (`200m`)."""
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
