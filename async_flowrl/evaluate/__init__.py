"""python -m async_flowrl.evaluate RUN_OR_LORA: rewards before and after training, in a fresh pipeline.

Nothing of the training loop takes part but the rewards: diffusers' own pipeline loads the weights and makes the images,
from the same initial noises before and after. With a run's own evaluation seed they are those of its evaluations.
"""

from async_flowrl.evaluate.command import main
from async_flowrl.evaluate.job import Job, job_of_run
from async_flowrl.evaluate.measure import evaluate

__all__ = ["Job", "evaluate", "job_of_run", "main"]
