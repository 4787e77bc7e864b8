"""Options of the commands that train."""

from typing import Annotated

import typer

Ranks = Annotated[int, typer.Option(help="How many ranks.", min=1)]
Model = Annotated[str, typer.Option(help='Size of the GPT: "tiny", "1M" or "3.4M".')]
Steps = Annotated[int, typer.Option(help="How many steps to train.", min=1)]
Rows = Annotated[int, typer.Option(help="Sequences in the global batch; may be uneven.", min=1)]
Dtype = Annotated[str, typer.Option(help='"float64" proves equality, "float32" is usual.')]
Lr = Annotated[float, typer.Option(help="Learning rate of AdamW.")]
Seed = Annotated[int, typer.Option(help="Seed of model and data.", min=0)]
TextPath = Annotated[
    str | None, typer.Option("--text", help="A text file or folder; Python's own docs if absent.")
]
