"""The reward server: `async-flowrl serve-rewards reward=ocr` serves rewards over HTTP.

`app.py` and `server.py` do not import torch, so servers with an environment of their own (examples/reward_servers) can
use them.
"""
