"""Made-up sweeps, as if they had been measured."""

from labkit.sweeps.alpha_beta import cost_of
from labkit.sweeps.sweep import BUS_FACTORS, Point

OPS = list(BUS_FACTORS)
SIZES = [1 << bits for bits in range(12, 27, 2)]
ABOUT = {"backend": "gloo", "host": "made up", "cores": 2, "torch": "2", "turns": 9}


def points_of(
    op: str, ranks: int, algorithm: str, seconds: dict[int, float], own: bool = False
) -> list[Point]:
    names = ("float32", "", algorithm, algorithm, own)
    return [
        Point(op, ranks, size, size // 4, *names, time_s, 1.0, 0, 1.0)
        for size, time_s in seconds.items()
    ]


def modelled(
    op: str, ranks: int, algorithm: str, alpha_s: float, beta: float, own: bool = False
) -> list[Point]:
    cost_at = {size: cost_of(op, algorithm, ranks, size) for size in SIZES}
    seconds = {size: cost.seconds(alpha_s, beta) for size, cost in cost_at.items()}
    return points_of(op, ranks, algorithm, seconds, own)
