"""Tests of a node's memory as control groups limit it."""

from pathlib import Path

import psutil
import pytest

from separation import node as memory


@pytest.fixture(autouse=True)
def _groups_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")


def group(folder: Path, names: tuple[str, ...], limit: int, used: int, files: int) -> None:
    """Writes the files of a group. Of the caches of files, a third are those that Linux has not used for a while."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    inactive, active = names[2:]
    (folder / "memory.stat").write_text(
        f"anon 1\n{inactive} {files // 3}\nfile_dirty 7\n{active} {files - files // 3}\n"
    )


def test_memory_is_what_a_control_group_leaves(tmp_path: Path) -> None:
    """Of files that were read, which count as used, Linux gives up what is asked for."""
    group(tmp_path, memory.CGROUP_2, 1_000_000, 400_000, 300_000)
    assert (memory.total_memory(), memory.free_memory()) == (1_000_000, 900_000)
    here = memory.node_memory()
    assert (here.total, here.free) == (1_000_000, 900_000) and here.host
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.total_memory() == psutil.virtual_memory().total and memory.free_memory() > 1_000_000


@pytest.mark.parametrize(
    ("own", "folder", "names"),
    [
        ("0::/slurm/job_7/step_0\n", "slurm/job_7", memory.CGROUP_2),
        ("5:cpu:/other\n4:cpuacct,memory:/slurm/job_7\n", "memory/slurm/job_7", memory.CGROUP_1),
    ],
)
def test_memory_is_what_the_group_of_a_job_leaves(
    own: str, folder: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(own)
    group(tmp_path / folder, names, 1_000_000, 400_000, 30_000)
    assert (memory.total_memory(), memory.free_memory()) == (1_000_000, 630_000)


def test_processes_of_one_place_have_one_namespace_and_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []
    for namespace, own in (("1", "0::/job"), ("1", "0::/job"), ("2", "0::/job"), ("1", "0::/other")):
        link = tmp_path / f"{len(places)}"
        link.symlink_to(f"cgroup:[{namespace}]")
        monkeypatch.setattr(memory, "NAMESPACE", link)
        (tmp_path / "own").write_text(f"{own}\n3:cpu:/cpu_{len(places)}\n")
        places.append(memory.node_memory().place)
    first, same, *others = places
    assert first == same and len({first, *others}) == 3
    (tmp_path / "own").unlink()
    monkeypatch.setattr(memory, "NAMESPACE", tmp_path / "nowhere")
    assert memory.node_memory().place
