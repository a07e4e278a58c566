"""The program `ckptplan`, and `python -m ckptplan.cli`."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; Ctrl-C while its modules are loaded is one line, too."""
    try:
        from ckptplan.cli.app import app

        app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
