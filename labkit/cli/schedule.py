"""`labkit schedule`: a pipeline's schedule, printed and drawn."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from labkit.cli.terminal import app, console, save_picture
from labkit.foreign import check_picture

MOST_FORWARDS = 20_000  # limit for printed schedules


@app.command(
    epilog="Examples:  labkit schedule 1f1b  ·  labkit schedule interleaved --stages 4 "
    "--microbatches 8 --chunks 2  ·  labkit schedule zb-h1 --plot zb.png"
)
def schedule(
    name: Annotated[
        str, Argument(help="naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2 or pipedream.")
    ],
    stages: Annotated[
        int, Option(help="Stages of the pipeline, one per rank.", min=1, max=256)
    ] = 4,
    microbatches: Annotated[int, Option(help="Micro-batches per batch.", min=1)] = 8,
    chunks: Annotated[
        int | None, Option(help="Chunks of the model per stage; default: 2 for interleaved.", min=1)
    ] = None,
    plot: Annotated[
        Path | None,
        Option(help="Draw the schedule over time, as a PNG file.", callback=check_picture),
    ] = None,
) -> None:
    """Print a pipeline schedule, its bubble, and the micro-batches in flight on each stage."""
    from labkit import schedules
    from labkit.plot.pipeline_lanes import lanes_of

    chunks = chunks or (2 if name == "interleaved" else 1)
    if (forwards := stages * microbatches * chunks) > MOST_FORWARDS:
        raise ValueError(
            f"stages x micro-batches x chunks = {forwards:,}; choose at most {MOST_FORWARDS:,}"
        )
    actions = schedules.schedule(name, stages, microbatches, chunks)
    lanes = lanes_of(actions, name)
    console.print(
        f"{schedules.show(actions)}\n"
        f"A step takes the time of {lanes.step:g} forwards; its bubble is {lanes.bubble:.1%}. (A "
        f"backward takes as long as 2 forwards: 1 for the input and 1 for the weights.)\n"
        f"Peak micro-batches in flight per stage: {', '.join(f'{x:g}' for x in lanes.held)}.",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    if plot is not None:
        from labkit.plot import schedule as draw

        save_picture(draw(actions, name=name), plot)
