"""Entry point of `python -m async_flowrl.evaluate`."""

import sys

from async_flowrl.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main())
