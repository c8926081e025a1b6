"""The process that a raylet starts in place of its dashboard agent: it does nothing, and ends when the raylet ends.

It is executed by its path, without any package. The raylet ends if this process ends. It must not take its parent for
the raylet without a look: the raylet may be dead before Python has started.
"""

import os
import signal
import time

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # A raylet starts its agents with signals blocked.
    raylet = int(os.environ["RAY_RAYLET_PID"])
    while os.getppid() == raylet:
        time.sleep(1)
