"""`labkit nccl-log`: the rings, trees and transports that NCCL chose."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from labkit.cli.terminal import app, console, save_picture
from labkit.foreign import check_picture, read_file


@app.command(
    "nccl-log",
    epilog="Examples:  NCCL_DEBUG=INFO torchrun ... 2>&1 | tee nccl.log; labkit nccl-log nccl.log"
    "  ·  labkit nccl-log logs/*  (NCCL_DEBUG_FILE=logs/%h.%p: a file per process)"
    "  ·  labkit nccl-log --example two_nodes",
)
def nccl_log(
    files: Annotated[
        list[str] | None,
        Argument(
            metavar="FILES",
            help="Output of all ranks of one run with NCCL_DEBUG=INFO, in one file or several; "
            "- is standard input.",
        ),
    ] = None,
    example: Annotated[
        str, Option(help="An example instead of files: one_node, two_nodes or sockets.")
    ] = "",
    out: Annotated[
        Path | None,
        Option(help="Picture file; default: ./FILE.png.", callback=check_picture),
    ] = None,
) -> None:
    """Report and draw what NCCL chose: rings, trees, channels, and the transport of each link."""
    from labkit import plot
    from labkit.plot.nccl_logs import MOST_RANKS
    from labkit.trace.nccl_log import EXAMPLES, parse_nccl_log
    from labkit.trace.nccl_log.summary import table

    if bool(files) == bool(example):
        raise ValueError("pass either log files or --example two_nodes")
    if example and example not in EXAMPLES:
        raise ValueError(f"no example {example!r}; choose one of {', '.join(EXAMPLES)}")
    sources = files or [str(EXAMPLES[example])]
    log = parse_nccl_log("\n".join(_text_of(source) for source in sources))
    name, stem = f"{len(sources)} logs", "nccl"
    if sources == ["-"]:
        name = "standard input"
    elif len(sources) == 1:
        name, stem = Path(sources[0]).name, Path(sources[0]).stem
    console.print(table(log, f"{example}, composed for teaching" if example else name))
    if log.main.size > MOST_RANKS:
        console.print(f"No picture: {log.main.size} ranks, but at most {MOST_RANKS} are drawn.")
        return
    picture = out or Path(f"{stem}.png")
    check_picture(picture)
    save_picture(plot.nccl(log), picture)


def _text_of(source: str) -> str:
    """The content of the file, or of standard input for "-"."""
    if source == "-":
        return typer.get_text_stream("stdin", "utf-8", "replace").read()
    return read_file(source).decode(errors="replace")
