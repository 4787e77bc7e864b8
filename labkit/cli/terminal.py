"""Where the commands print, and how they report errors."""

import re
from typing import Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from typer.core import TyperGroup

from labkit.foreign import markup

console = Console()


def print_table(table: Table) -> None:
    """As wide as its columns need, whatever the terminal has: a number is never cut."""
    unlimited = console.options.update(max_width=1000)
    width = Measurement.get(console, unlimited, table).maximum
    Console(width=max(width, console.width)).print(table)


class ErrorGroup(TyperGroup):
    """Commands whose errors, where a user can mend them, are a sentence and not a traceback."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            known = ", ".join(self.commands)
            raise ValueError(f"no {self.name or 'command'} {cmd_name!r}; there are {known}")
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            console.print("interrupted")
            raise typer.Exit(130) from None
        except (typer.Exit, typer.Abort):
            raise
        except (ValueError, OSError, RuntimeError) as error:
            from labkit.runtime.errors import RankError

            if isinstance(error, RuntimeError) and not isinstance(error, RankError):
                raise
            console.print(f"[red]labkit:[/] {markup(_sentence(str(error)))}", highlight=False)
            raise typer.Exit(2) from None


def _sentence(text: str) -> str:
    """Only the message, where ranks have refused something by a ValueError, all in one way."""
    found = re.match(r"(?s)ranks? [\d, and]+ raised ValueError: (.+?)\n\nTraceback ", text)
    return found[1] if found and text.count(" raised ") == 1 else text
