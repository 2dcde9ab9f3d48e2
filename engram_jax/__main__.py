"""Run a command: ``python -m engram_jax check DIR`` or ``plan CONFIG``."""

import argparse
import sys
from collections.abc import Sequence

from . import check, plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name.

    Args:
      arguments: What follows ``python -m engram_jax``; None takes the process's.

    Returns:
      The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m engram_jax", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in (("check", check), ("plan", plan)):
        text = (command.__doc__ or "").partition(":")[0] + "."
        subparser = commands.add_parser(name, help=text, description=text)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    text, code = options.run(options)
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
