"""python -m async_flowrl.check_model."""

import sys

from async_flowrl.check_model.command import main

if __name__ == "__main__":
    sys.exit(main())
