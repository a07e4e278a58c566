"""`python -m ckptplan.run --budget 20GiB train.py ARGS`: `ckptplan run` for launchers that start a module."""

from __future__ import annotations

import sys

from ckptplan.cli.app import app

if __name__ == "__main__":
    app(["run", *sys.argv[1:]])
