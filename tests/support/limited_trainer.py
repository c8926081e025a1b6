"""LimitedTrainer is a trainer rank whose files may have only a given number of bytes, as on a full disk."""

import resource

from async_flowrl.training.trainer_worker import TrainerWorker


class LimitedTrainer(TrainerWorker):
    def limit(self, size: int) -> None:
        """Sets the size in bytes at which the system refuses to write on, with an OSError; -1: none."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def has_copy(self) -> bool:
        """Whether host memory holds a copy for a checkpoint."""
        return self.saving.snapshot is not None
