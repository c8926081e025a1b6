"""Evaluation after training: rewards of the base model and of the trained weights, in a new diffusers pipeline.

python -m async_flowrl.evaluate RUN_OR_LORA

Of the training loop only the rewards take part. diffusers' own pipeline loads the weights and makes the images, from
the same initial noises before and after. With the run's evaluation seed, these are the noises of the run's own
evaluations.
"""

from async_flowrl.evaluate.job import Job, job_of_run
from async_flowrl.evaluate.measure import evaluate

__all__ = ["Job", "evaluate", "job_of_run"]
