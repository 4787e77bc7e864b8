"""Collectives: the bytes that each rank must send, and the time to send them.

    least_s        S / B x bus factor     the lower bound: bandwidth alone
    algorithm_s    steps x alpha + ...    a given algorithm: the alpha-beta model

Legend: S bytes of the collective (all n shards together in all-gather and reduce-scatter), B
bytes per second out of a rank, n ranks. Costs of algorithms: labkit/comm/collectives/costs.py.
"""

from labkit.predict.sizes import check_counts, check_not_negative, check_positive

BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_reduce_in_network": lambda n: (n - 1) / (n + 1),
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0 if n > 1 else 0.0,
    "reduce": lambda n: 1.0 if n > 1 else 0.0,
}


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth divided by algorithm bandwidth: the bytes that each rank must send (broadcast:
    the root; reduce: the root receives), divided by S. With "all_reduce_in_network" (SHARP), ranks
    send S. Source: nccl-tests, doc/PERFORMANCE.md. Raises ValueError for an unknown collective."""
    check_counts(ranks=ranks)
    if collective not in BUS_FACTORS:
        raise ValueError(
            f"collective={collective!r} has no bus factor; choose one of {', '.join(BUS_FACTORS)}"
        )
    return BUS_FACTORS[collective](ranks)


def least_s(collective: str, ranks: int, nbytes: float, bytes_per_s: float) -> float:
    """The fewest seconds that `collective` can take if each rank sends at `bytes_per_s`: S / B x
    bus factor, with S = `nbytes`. Source: nccl-tests, doc/PERFORMANCE.md."""
    check_not_negative(nbytes=nbytes)
    check_positive(bytes_per_s=bytes_per_s)
    return nbytes / bytes_per_s * bus_factor(collective, ranks)


def algorithm_s(
    collective: str,
    algorithm: str,
    ranks: int,
    nbytes: float,
    alpha_s: float,
    bytes_per_s: float,
    reduced_bytes_per_s: float = float("inf"),
) -> float:
    """Seconds that a labkit algorithm takes, as in algorithm_s("all_reduce", "ring", 8, ...).
    `alpha_s`: latency per message; `reduced_bytes_per_s`: a rank's reduction rate, infinite by
    default. Source: Hockney's alpha-beta model; for the algorithms, labkit/comm/collectives/.
    Raises ValueError for an unknown collective or algorithm."""
    from labkit.comm.collectives.costs import COSTS, cost  # here: labkit.comm imports torch

    check_counts(ranks=ranks)
    check_not_negative(nbytes=nbytes, alpha_s=alpha_s)
    check_positive(bytes_per_s=bytes_per_s, reduced_bytes_per_s=reduced_bytes_per_s)
    if algorithm not in COSTS.get(collective, {}):
        known = (f"{name}: {', '.join(ways)}" for name, ways in COSTS.items())
        raise ValueError(f"no cost for {collective} by {algorithm!r}; known: {'; '.join(known)}")
    total = cost(collective, algorithm, ranks, nbytes)
    return total.seconds(alpha_s, 1 / bytes_per_s, 1 / reduced_bytes_per_s)
