"""The command line in this process."""

from typer.testing import CliRunner

from shaketable.cli import app


def shaketable(*words):
    """`shaketable WORDS…` as typer runs it."""
    return CliRunner().invoke(app, [str(w) for w in words])
