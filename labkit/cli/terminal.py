"""The app, its console, error reports, and options shared by several commands."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from typer import Option
from typer.core import TyperGroup

from labkit import __version__
from labkit.foreign import check_picture, markup

console = Console()

Model = Annotated[str, Option(help='Size of the GPT: "tiny", "1M" or "3.4M".')]
Steps = Annotated[int, Option(help="Number of training steps.", min=1)]
Rows = Annotated[int, Option(help="Sequences per global batch; shares may be unequal.", min=1)]
Dtype = Annotated[str, Option(help='"float64" (to prove equality) or "float32" (as usual).')]
Lr = Annotated[float, Option(help="Learning rate of AdamW.")]
Seed = Annotated[int, Option(help="Seed of model and data.", min=0)]
TextPath = Annotated[
    str | None, Option("--text", help="A text file or folder; default: Python's documentation.")
]
Plot = Annotated[Path | None, Option(help="Draw a picture, as a PNG file.", callback=check_picture)]


def split_words(text: str | None) -> list[str]:
    """ "ring, tree" -> ["ring", "tree"]."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def split_numbers(option: str, text: str) -> list[int]:
    """ "2,4" -> [2, 4]. Raises ValueError, naming the option, for any other text or none."""
    words = split_words(text)
    if wrong := [word for word in words or [text] if not word.isdecimal()]:
        raise ValueError(f"--{option} {wrong[0]!r}: pass whole numbers, such as --{option} 2,4")
    return [int(word) for word in words]


def print_table(table: Table) -> None:
    """Print at the width that the columns need, even on a narrower terminal: numbers never wrap."""
    unlimited = console.options.update(max_width=1000)
    width = Measurement.get(console, unlimited, table).maximum
    Console(width=max(width, console.width)).print(table)


def save_picture(figure: Any, path: Path, dpi: float | str = 120, quiet: bool = False) -> None:
    """Save the figure, and print its path."""
    figure.savefig(path, dpi=dpi)
    if not quiet:
        console.print(f"Picture: {markup(path)}", soft_wrap=True)


class ErrorGroup(TyperGroup):
    """A command group that reports user errors in one sentence, without a traceback."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            known = ", ".join(self.commands)
            raise ValueError(f"no {self.name or 'command'} {cmd_name!r}; choose one of {known}")
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
    """The message alone, if all failing ranks raised the same ValueError; else the whole text."""
    refused = re.match(r"(?s)ranks? [\d, and]+ raised ValueError: (.+?)\n\nTraceback ", text)
    return refused[1] if refused and text.count(" raised ") == 1 else text


app = typer.Typer(
    cls=ErrorGroup,
    help="Distributed training you can read, run, check and see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        console.print(f"labkit {__version__}")
        raise typer.Exit
