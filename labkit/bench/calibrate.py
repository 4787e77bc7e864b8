"""`labkit bench calibrate`: the constants of the A100, fitted anew to published step times."""

from datetime import date
from pathlib import Path

from rich.console import Group
from rich.table import Table

from labkit.clusters import cluster
from labkit.replaying.planning.calibrate import CLUSTER, calibrate, toml_lines, wires_inside
from labkit.replaying.planning.calibrated import Calibration, calibration, save_calibration
from labkit.replaying.planning.measured import PUBLISHED, all_reduces, step_rows


def bench_calibrate(folder: Path = PUBLISHED) -> Calibration:
    """Fit to the tables of this folder; minutes, most of them to record layers."""
    return calibrate(step_rows(folder))


def table(found: Calibration, folder: Path = PUBLISHED) -> Group:
    """Constants with their intervals, errors of all kinds, and the lines for known.toml."""
    constants = Table("constant", "fitted", "nine in ten", title="Constants of the A100")
    for name, (value, low, high) in found.constants.items():
        constants.add_row(name, f"{value:.3g}", f"{low:.3g} to {high:.3g}")
    for name, value in wires_inside(all_reduces(folder), cluster(CLUSTER).inside).items():
        constants.add_row(name, f"{value:.3g}", "NCCL's all-reduces")
    errors = Table("steps", "rows", "mean absolute error", "median", title="Errors")
    for name, (rows, mean, median) in found.summary().items():
        errors.add_row(name, str(rows), f"{mean:.1%}", f"{median:.1%}")
    day = found.dated or str(date.today())
    return Group(constants, errors, "", "For labkit/clusters/known.toml:", toml_lines(found, day))


def run(folder: Path | None, save: Path | None, plot: Path | None, stored: bool) -> list[object]:
    """What the command prints."""
    where = PUBLISHED if folder is None else folder
    found = calibration() if stored else bench_calibrate(where)
    said: list[object] = [table(found, where)]
    if save is not None:
        said.append(f"All that was found: {save_calibration(found, save)}")
    if plot is not None:
        from labkit.plot.calibration import calibration as draw

        draw(found).savefig(plot)
        said.append(f"The picture: {plot}")
    return said
