"""One command as a test calls it, on a terminal of 80 columns."""

from collections.abc import Callable
from typing import Any

import typer
from typer.testing import CliRunner

from headwise.cli.output import option_text
from headwise.errors import HeadwiseError


class Alone:
    """A command without the others."""

    def __init__(self, command: Callable[..., None]) -> None:
        self._app = typer.Typer()
        self._app.command()(command)

    def invoke(self, *arguments: object) -> Any:
        """What typer's runner gives."""
        runner = CliRunner(env={"COLUMNS": "80"})
        return runner.invoke(self._app, [str(part) for part in arguments])

    def run(self, *arguments: object) -> tuple[str, str]:
        """Standard output and standard error of a run that succeeds."""
        done = self.invoke(*arguments)
        assert done.exit_code == 0, done.exception
        return done.stdout, done.stderr

    def refused(self, *arguments: object) -> HeadwiseError:
        """The error of a run that is refused, in the words that the command prints."""
        done = self.invoke(*arguments)
        assert isinstance(done.exception, HeadwiseError), done.exception
        saw, needed, do = done.exception.lines(option_text)
        return type(done.exception)(saw=saw, needed=needed, do=do)
