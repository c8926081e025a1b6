"""Entry point of `python -m async_flowrl.check_model`."""

import sys
from collections.abc import Sequence

from async_flowrl.check_model.arguments import parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the arguments before torch is imported, so that help and errors appear at once; returns the exit code."""
    parser().parse_args(arguments)
    from async_flowrl.check_model import command

    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
