"""The training loop of a run. It is the same in every mode (sync, stream, one_step_off, fully_async).

    prompts ─► tickets ─gate─► rollout workers ─► rewards ─► ready, group by group ─► trainer
                  ▲                                                                     │ version s+1
                  └──────── acknowledged, per worker ◄── checkpoint_engine ◄────────────┘

run/recovery.py calls `run`.

`dispatch` gives every rollout worker the tickets that the gate allows, and sends finished groups to the reward workers.
`trainer.update` waits for the groups of its step and trains on them. `weights.publish` returns as soon as the new
version is staged, i.e. copied aside; its delivery to the rollout workers goes on during the next update.

Two settings make the modes: `max_staleness` says how many steps generation may run ahead of training, and `hand_over`
says whether the trainer gets the groups of a step together (batch) or one by one as they are ready (stream).
"""

from async_flowrl.controller.after_step import AfterStep
from async_flowrl.controller.context import Context
from async_flowrl.controller.dispatch import dispatch
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.controller.watchdog import watch_for_stalls
from separation.supervise import supervised


async def run(ctx: Context, trainer: TrainerGroup, steps: AfterStep) -> None:
    """Trains from step `ctx.table.step` to the last one, or ends after the step in which a stop is requested."""
    # It returns when the last checkpoint is written and the outstanding evaluations are done. The first failure of any
    # part (dispatch, training, delivery, watchdog) cancels the others and is raised.
    async with supervised(dispatch(ctx), trainer.watch(), ctx.weights.watch(), watch_for_stalls(ctx)):
        await ctx.weights.publish_first()
        await steps.before_training(ctx)
        for step in range(ctx.table.step, ctx.config.total_steps):
            stats = await trainer.update(ctx, step)
            ctx.table.close_step(step)
            await ctx.weights.publish(step + 1)
            await steps.after_step(ctx, step, stats)
            if ctx.stop_requested():
                break
        await ctx.weights.drain()
        await steps.drain(ctx)
