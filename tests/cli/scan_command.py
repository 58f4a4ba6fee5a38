"""``headwise scan`` as a test calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from headwise.cli.scan.command import scan
from headwise.errors import HeadwiseError


def invoke(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(scan)
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, [str(part) for part in arguments])


def run(*arguments: object) -> tuple[str, str]:
    """Standard output and standard error of a run that succeeds."""
    done = invoke(*arguments)
    assert done.exit_code == 0, done.exception
    return done.stdout, done.stderr


def refused(*arguments: object) -> HeadwiseError:
    """The error of a run that writes no page."""
    done = invoke(*arguments)
    assert isinstance(done.exception, HeadwiseError), done.exception
    assert not Path("headwise-scan/index.html").exists()
    return done.exception
