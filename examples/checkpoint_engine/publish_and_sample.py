"""Example with two processes: one changes a tensor and publishes it, the other samples with the newest version.

python examples/checkpoint_engine/publish_and_sample.py
"""

import asyncio
import multiprocessing
import time

import torch

from checkpoint_engine import Delivery, Publisher, Receiver
from examples.checkpoint_engine.piped_processes import Channel, ProcessReceiver, ProcessSender, channel, serve


def sample(connections: Channel) -> None:
    """Runs the sampling process. It changes to a newer version between two samples, never during one."""
    weights, used = {"mean": torch.zeros(1000)}, -1
    receiver = Receiver(weights)
    with serve(connections, receiver) as ended:
        while True:
            over, held = ended.is_set(), receiver.held()
            if held and held[-1][1] != used:
                used = held[-1][1]
                digest = receiver.activate("policy", used)
                print(f"version {used} ({digest[:8]}): mean {torch.normal(weights['mean']).mean():.1f}", flush=True)
            elif over:
                return
            time.sleep(0.01)


async def publish(connections: Channel) -> None:
    """Runs the publishing process. When `Delivery.publish` returns, the tensor may change; the delivery goes on."""

    async def replace(name: str, error: BaseException) -> None:
        raise error

    mean = torch.zeros(1000)
    delivery = Delivery(ProcessSender(Publisher({"mean": mean})), replace=replace)
    sampler = ProcessReceiver(connections, "sampler")
    await delivery.join(sampler)
    for version in range(5):
        mean.fill_(float(version))
        await delivery.publish(version)
        await delivery.drain()  # waits for the delivery; a trainer would continue training here
    await delivery.close()
    sampler.close()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = channel(context)
    process = context.Process(target=sample, args=(theirs,))
    process.start()
    for connection in theirs:
        connection.close()
    asyncio.run(publish(ours))
    process.join()
