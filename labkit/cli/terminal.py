"""Where the commands print, and how they tell errors."""

from contextlib import ContextDecorator
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

console = Console()


class told(ContextDecorator):
    """Errors that a user can mend are a sentence, not a traceback."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        from labkit.world import RankError, RankInterrupt

        if isinstance(error, (KeyboardInterrupt, RankInterrupt)):
            console.print("interrupted")
            raise typer.Exit(130) from None
        if isinstance(error, (ValueError, OSError, RankError)):
            console.print(f"[red]labkit:[/] {error}", highlight=False)
            raise typer.Exit(2) from None


class ToldGroup(TyperGroup):
    """Commands in a file of their own, with errors told as here."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            raise ValueError(f"no {self.name} {cmd_name!r}; there are {', '.join(self.commands)}")
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        with told():
            return super().invoke(ctx)
