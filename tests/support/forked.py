"""CONTEXT starts processes that have imported torch, diffusers and the trainer already, which takes seconds each time.

They are forked by a process that imports these once, has no threads and loads no model (multiprocessing's forkserver).
"""

import multiprocessing
import sys
from multiprocessing.connection import Connection

METHOD = "forkserver"
CONTEXT = multiprocessing.get_context(METHOD)
PRELOADED = [
    "pytest",
    "torch",
    "torch.distributed.tensor",
    "diffusers.pipelines.qwenimage.pipeline_qwenimage",
    "peft",
    "async_flowrl.training.worker",
    "async_flowrl.policies.qwen_image",
    "tests.support.trainer_rig",
]
CONTEXT.set_forkserver_preload(PRELOADED)
"""The list is global to the process. A module that needs another list sets it when it starts its first process, and not
when it is imported, or it overwrites this one."""


def imported(said: Connection) -> None:
    """Sends which of PRELOADED a forked process has imported when it begins."""
    said.send([name for name in PRELOADED if name in sys.modules])
