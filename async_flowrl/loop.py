"""The one loop that is every mode. Read this first.

    prompts ─► tickets ─gate─► rollout workers ─► rewards ─► ready, group by group ─► trainer
                  ▲                                                                     │ version s+1
                  └──────── acknowledged, per worker ◄── checkpoint_engine ◄────────────┘

`dispatch` feeds every rollout worker whatever the gate gives it; `trainer.update` waits for the groups of its step;
`weights.publish` returns when the new version is staged, and its delivery overlaps the next update. How far generation
may run ahead is one number, `max_staleness`; whether a step's groups are handed over together or one by one is
`hand_over`. Nothing else tells the modes apart.
"""

from async_flowrl.controller.context import Context
from async_flowrl.controller.dispatch import dispatch
from async_flowrl.controller.watchdog import watch_for_stalls
from separation.supervise import supervised


async def run(ctx: Context) -> None:
    """Trains from `ctx.table.step` to the end (or until asked to stop); the first failure of any part is raised."""
    async with supervised(dispatch(ctx), ctx.weights.watch(), watch_for_stalls(ctx)):
        await ctx.weights.publish_first()
        await ctx.steps.before_training(ctx)
        for step in range(ctx.table.step, ctx.config.total_steps):
            stats = await ctx.trainer.update(ctx, step)
            ctx.table.close_step(step)
            await ctx.weights.publish(step + 1)
            await ctx.steps.after_step(ctx, step, stats)
            if ctx.stop_requested():
                break
        await ctx.weights.drain()
        await ctx.steps.drain(ctx)
