"""Serves rewards over HTTP: `async-flowrl serve-rewards reward=ocr`. `app.py` and `server.py` import no torch, so that
servers with an environment of their own (examples/reward_servers) use them too."""
