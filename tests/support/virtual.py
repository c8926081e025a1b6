"""Virtual time for tests: the planner's own event loop (async_flowrl/plan/virtual_time.py)."""

from async_flowrl.plan.virtual_time import Deadlock, HorizonReached, Livelock, VirtualTimeLoop, run_virtual

__all__ = ["Deadlock", "HorizonReached", "Livelock", "VirtualTimeLoop", "run_virtual"]
