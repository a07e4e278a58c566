"""`python -m ckptplan.cli`."""

from ckptplan.cli.app import app

app()
