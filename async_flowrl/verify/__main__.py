"""Entry point of `python -m async_flowrl.verify`."""

import sys

from async_flowrl.verify.command import main

if __name__ == "__main__":
    sys.exit(main())
