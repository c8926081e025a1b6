"""Runs the command of report/command.py: python -m async_flowrl.report RUN [RUN ...]"""

import sys

from async_flowrl.report.command import main

if __name__ == "__main__":
    sys.exit(main())
