"""CONTEXT starts processes that have imported torch, diffusers and the trainer already, which takes seconds each time.

They are forked by a process that imports these once, has no threads and loads no model (multiprocessing's forkserver).
"""

import multiprocessing

METHOD = "forkserver"
CONTEXT = multiprocessing.get_context(METHOD)
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.tensor",
        "diffusers.pipelines.qwenimage.pipeline_qwenimage",
        "peft",
        "async_flowrl.training.worker",
        "async_flowrl.policies.qwen_image",
        "tests.support.trainer_rig",
    ]
)
