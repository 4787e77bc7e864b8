"""`labkit doctor`: examine this machine, or measure it as a cluster."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from labkit.cli.terminal import app, console
from labkit.foreign import markup


@app.command(epilog="Examples:  labkit doctor  ·  labkit doctor --cluster laptop.toml --ranks 4")
def doctor(
    cluster: Annotated[
        Path | None,
        Option(
            metavar="FILE.toml",
            help="Instead, measure this machine for about ten seconds and write it to this file "
            "as a cluster to replay runs on. Close other programs first.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, Option(help="With --cluster: the number of ranks; default: 4.", min=1)
    ] = None,
) -> None:
    """Report the hardware and software of this machine, what a lab will use, and any problems."""
    from labkit import doctor as examining
    from labkit.bench.machine import measure_machine
    from labkit.clusters import write_clusters
    from labkit.view import grouped_table

    if cluster is None and ranks is not None:
        raise ValueError("--ranks is for measuring; pass --cluster FILE.toml as well")
    if cluster is not None:
        examining.check_cluster_file(cluster)
        measured = measure_machine(ranks or 4)
        write_clusters(cluster, {measured.name: measured})
        console.print(examining.cluster_table(measured))
        console.print(
            f"To use it: from labkit import read_clusters; "
            f'read_clusters("{cluster.as_posix()}")["{measured.name}"]',
            markup=False,
        )
        return
    with console.status("examining this machine ..."):
        findings = examining.examine()
    console.print(grouped_table("labkit doctor", findings.groups))
    for problem in findings.problems:
        console.print(f"[red]problem:[/] {markup(problem)}")
    if findings.problems:
        raise typer.Exit(1)
    console.print("[green]No problems found.[/]")
