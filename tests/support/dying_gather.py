"""DyingGather is a trainer rank whose process is killed within a gather of its rows."""

from typing import Any

import numpy as np

from async_flowrl.training.trainer_worker import TrainerWorker
from async_flowrl.training.versions import GatheredStreams
from checkpoint_engine.gather import Gather
from tests.support import trainer_rig as rig
from tests.support.process_pool import die


class DyingGather(TrainerWorker):
    def next_version(self) -> None:
        """Makes a version of other weights, as a training step does."""
        self.parameters.values.data.add_(1.0)
        self.parameters.changed()
        self.versions.retain(self.versions.newest + 1)

    def weights(self) -> dict[str, np.ndarray]:
        """Returns this rank's rows of the trained weights by name, float32."""
        return rig.weights(self)

    def die_in(self, bucket: int) -> None:
        """The process ends in this bucket of the next gather, when the bucket before it is on its way."""
        assert isinstance(self.sender, GatheredStreams)
        start = Gather.start

        def dying(gather: Gather, what: str, piece: Any, peer: int, number: int) -> Any:
            if number == bucket:
                die()
            return start(gather, what, piece, peer, number)

        Gather.start = dying  # type: ignore[method-assign]
