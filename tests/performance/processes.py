"""CPU seconds of a command and of every process below it, by the part that each process plays in a run.

They come from /proc, so they are true on a machine that is busy with other things. What a process takes between the
last look at it and its end is not counted.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

DRIVER = "driver"
UNUSED = "unused Ray workers"
DAEMONS = {
    "raylet": "raylet",
    "gcs_server": "gcs_server",
    "dashboard/agent.py": "dashboard agent",
    "dashboard/dashboard.py": "dashboard",
    "runtime_env/agent/main.py": "runtime-env agent",
    "log_monitor.py": "log monitor",
    "autoscaler/_private/monitor.py": "monitor",
    "autoscaler/v2/monitor.py": "monitor",
    "ray::DashboardAgent": "dashboard agent",
    "ray::RuntimeEnvAgent": "runtime-env agent",
    "workers/default_worker.py": UNUSED,
    "ray::": UNUSED,
}
"""The program or script of one of Ray's processes, or the end of its path → what it is."""
OTHERS = "other processes"
_NAMED = re.compile(r"process (\d+) on ")


class Threads(dict[tuple[str, int], dict[int, float]]):
    """(part, process) → thread → its CPU seconds so far."""

    def since(self, before: "Threads") -> dict[str, tuple[float, float]]:
        """Part → CPU seconds since `before` of the busiest thread of each of its processes, and of all the others."""
        parts: dict[str, tuple[float, float]] = {}
        for (part, process), threads in self.items():
            known = before.get((part, process), {})
            taken = [seconds - known.get(thread, 0.0) for thread, seconds in threads.items()]
            busiest, others = parts.get(part, (0.0, 0.0))
            parts[part] = busiest + max(taken), others + sum(taken) - max(taken)
        return parts


class Tree:
    """The processes below one command. `look` often enough that none begins and ends unseen."""

    def __init__(self, root: int, run_directory: Path) -> None:
        self._root = psutil.Process(root)
        self._directory = run_directory
        self._seconds: dict[tuple[int, float], float] = {}
        self._programs: dict[tuple[int, float], str] = {}
        self.peak_bytes = 0
        """Most that the resident sets of all came to in a look; pages that several share count for each."""

    def look(self) -> None:
        """Reads the CPU seconds and the resident sets of all that run now."""
        resident = 0
        for process in self._processes():
            try:
                times = process.cpu_times()
                key = (process.pid, process.create_time())
                self._seconds[key] = times.user + times.system
                resident += process.memory_info().rss
                if program := program_of(process.cmdline()):
                    self._programs[key] = program
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self.peak_bytes = max(self.peak_bytes, resident)

    def threads(self) -> "Threads":
        """Reads the CPU seconds of every thread that runs now."""
        workers, found = workers_of(self._directory), Threads()
        for process in self._processes():
            try:
                part = self._part((process.pid, process.create_time()), workers)
                found[part, process.pid] = {each.id: each.user_time + each.system_time for each in process.threads()}
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def by_part(self) -> dict[str, float]:
        """CPU seconds so far of the driver, each pool's workers, and each of Ray's daemons."""
        workers = workers_of(self._directory)
        parts: Counter[str] = Counter()
        for key, seconds in self._seconds.items():
            parts[self._part(key, workers)] += seconds
        return dict(parts)

    def processes(self) -> Counter[str]:
        """How many processes there have been of each part."""
        workers = workers_of(self._directory)
        return Counter(self._part(key, workers) for key in self._seconds)

    def _processes(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _part(self, key: tuple[int, float], workers: Mapping[int, str]) -> str:
        pid, _ = key
        if pid == self._root.pid:
            return DRIVER
        if pid in workers:
            return workers[pid]
        program = self._programs.get(key, "")  # a process that had ended before its command was read has none
        return next((part for name, part in DAEMONS.items() if program.endswith(name) or name in program[:5]), OTHERS)


def program_of(command: Sequence[str]) -> str:
    """The script of an interpreter, what a process of Ray's has renamed itself, else the program."""
    if not command:
        return ""
    if command[0].startswith("ray::"):
        return command[0]
    scripts = [word for word in command[1:] if word.endswith(".py")]
    return scripts[-1] if "python" in Path(command[0]).name and scripts else Path(command[0]).name


def workers_of(run_directory: Path) -> dict[int, str]:
    """Process id → pool, from what every worker writes into its log first."""
    pools = {}
    for log in sorted((run_directory / "logs").glob("*-*.log")):
        if found := _NAMED.search(log.read_text(errors="replace")):
            pools[int(found[1])] = log.stem.rpartition("-")[0]
    return pools
