"""python -m async_flowrl.export."""

import sys

from async_flowrl.export.command import main

if __name__ == "__main__":
    sys.exit(main())
