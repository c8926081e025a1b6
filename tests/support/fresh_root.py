"""A fresh Debian system in a folder, made by debootstrap, in which commands run as in a new container."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,ca-certificates"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PREPARE = 'mount --make-rprivate / && mount -t proc proc "$ROOT/proc" && mount --rbind /dev "$ROOT/dev"'


def obstacle() -> str | None:
    """Returns a sentence about why no such system can be made here; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a root of its own needs root on Linux"
    missing = [tool for tool in ("debootstrap", "unshare", "chroot") if shutil.which(tool) is None]
    return f"no {' and no '.join(missing)}: apt-get install {' '.join(missing)}" if missing else None


@dataclass
class FreshRoot:
    """The system in the folder `path`. Mounts are made in a namespace of each command and end with the command."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)

    def make(self) -> None:
        """Makes the system. Raises AssertionError, with debootstrap's output, if that fails."""
        said(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(self.path), MIRROR])
        (self.path / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
        shutil.copy("/etc/resolv.conf", self.path / "etc" / "resolv.conf")
        if CERTIFICATES.exists():  # The network here may need certificates that Debian does not ship.
            shutil.copy(CERTIFICATES, self.path / CERTIFICATES.relative_to("/"))

    def run(self, text: str, folder: str) -> None:
        """Runs a shell command in the folder `folder` of the system.

        Raises AssertionError, with the command's output, if it fails.
        """
        options, mounts = pip_options(), [PREPARE]
        named = {found for value in options.values() for found in re.findall(r"(?:file://)?(/[^\s'\"]+)", value)}
        # The packages of a local index lie in the folder above its `simple`.
        for name in sorted(each.removesuffix("/simple") for each in named):
            there = self.path / name[1:]
            if Path(name).is_dir():
                there.mkdir(parents=True, exist_ok=True)
                mounts.append(f'mount --bind "{name}" "$ROOT{name}"')
            elif Path(name).is_file() and not there.exists():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(name, there)
        inside = 'exec chroot "$ROOT" sh -c \'cd "$0" && eval "$1"\' "$FOLDER" "$TEXT"'
        environment = {"PATH": PATH, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", **options}
        environment |= {**self.environment, "ROOT": str(self.path), "FOLDER": folder, "TEXT": text}
        command = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "sh", "-c"]
        said([*command, " && ".join([*mounts, inside])], environment)


def pip_options() -> dict[str, str]:
    """Returns the environment variables with which pip finds packages as it does here.

    They are made from pip's configuration and from the proxy variables of this process.
    """
    listed = said([sys.executable, "-m", "pip", "config", "list"])
    found = dict(re.findall(r"^(?:global|install)\.([a-z-]+)='(.*)'$", listed, re.MULTILINE))
    variables = {f"PIP_{name.upper().replace('-', '_')}": " ".join(value.split("\\n")) for name, value in found.items()}
    return variables | {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}


def said(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Runs a command and returns its output. Raises AssertionError, with the output, if it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
