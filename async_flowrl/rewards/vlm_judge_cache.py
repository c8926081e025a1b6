"""The judge's replies on disk, by a hash of the question, so that no question is asked twice.

It answers repeated images, retried groups and resumed runs. Each process appends JSON lines to a file of its own in the
folder. This needs no locks, which network file systems may lack. A killed process leaves at most one unfinished line,
which is ignored.
"""

import errno
import json
import os
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from async_flowrl.rewards.vlm_judge_reply import Answer


@dataclass
class ReplyCache:
    """An index of keys in memory (about 200 bytes each), and the answers on disk.

    If two files have the same key, the answer that was read first is used.
    """

    folder: Path
    _places: dict[bytes, tuple[Path, int, int]] = field(default_factory=dict)
    """Key → file, and offset and length of its line in bytes."""
    _read: dict[Path, int] = field(default_factory=dict)
    """File of another process → number of its bytes that are indexed in `_places`."""
    _own: BinaryIO | None = None
    _own_path: Path = Path()
    _own_size: int = 0

    def refresh(self) -> None:
        """Indexes lines that other processes have added. Raises ValueError, which names the file, for a damaged one."""
        for path in sorted(self.folder.glob("*.jsonl")):
            start = self._read.get(path, 0)
            if path != self._own_path and path.stat().st_size > start:
                self._read[path] = self._index(path, start)

    def _index(self, path: Path, start: int) -> int:
        with path.open("rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    key = bytes.fromhex(json.loads(line)["key"])
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{path}: byte {start} begins no kept reply; delete the file") from error
                self._places.setdefault(key, (path, start, len(line)))
                start += len(line)
        return start

    def get(self, key: bytes) -> Answer | None:
        """Returns the stored answer; None if there is none."""
        if key not in self._places:
            return None
        path, offset, length = self._places[key]
        with path.open("rb") as file:
            file.seek(offset)
            kept: dict[str, Any] = json.loads(file.read(length))["answer"]
        return Answer(kept["text"], kept["cut"], tuple((token, logprob) for token, logprob in kept["first"]))

    def put(self, key: bytes, answer: Answer) -> None:
        """Appends an answer to this process's file, which is created by the first call; call `sync` to make it durable.

        Raises OSError if the answer cannot be written.
        """
        if self._own is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._own_path = self.folder / f"{uuid.uuid4().hex}.jsonl"
            self._own = self._own_path.open("ab", buffering=0)
        line = json.dumps({"key": key.hex(), "answer": asdict(answer)}, allow_nan=False).encode() + b"\n"
        path, offset = self._own_path, self._own_size
        if self._own.write(line) != len(line):
            self._own.truncate(offset)
            raise OSError(errno.ENOSPC, "no room for a judge's reply", str(path))
        self._places.setdefault(key, (path, offset, len(line)))
        self._own_size += len(line)

    def sync(self) -> None:
        """Returns once all answers of this process are on the disk."""
        if self._own is not None:
            os.fsync(self._own.fileno())
