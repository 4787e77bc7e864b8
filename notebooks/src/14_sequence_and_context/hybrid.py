"""Context-parallel jobs, and the exposed time for each u: groups of u of the n ranks exchange
tokens for heads (Ulysses), and rings of n/u ranks pass blocks around.

              u neighbors: Ulysses              u = 1    only a ring
    ring      0  1  2  3                        u = n    only Ulysses
      │       4  5  6  7                        n = 8, u = 4: rank 0 is in a ring with rank 4

In a group of u, a rank holds h/u heads of u times as many tokens; its ring passes k and v around.
Source of the combination: Fang, Zhao, "USP", arXiv 2405.07719.
"""

from typing import NamedTuple

from labkit.predict.context import ring_exposed_s, ulysses_bytes


class Job(NamedTuple):
    """One layer's attention, bf16, on `ranks` GPUs, with `node` GPUs per node."""

    sequence: int
    rows: int
    heads: int
    kv_heads: int
    head_width: int
    ranks: int
    node: int
    flops_per_s: float = 400e12
    inside: tuple[float, float] = (400e9, 5e-6)  # bytes per second, seconds per message
    between: tuple[float, float] = (25e9, 10e-6)


JOBS = {
    "a short document, one node": Job(8_192, 1, 32, 32, 128, 8, 8),
    "a book, two nodes": Job(131_072, 1, 32, 8, 128, 16, 8),
    "a million tokens, 8 nodes": Job(1_048_576, 1, 32, 8, 128, 64, 8),
    "few key-value heads, one node": Job(32_768, 1, 64, 4, 128, 8, 8),
}
BEST_US = 8_766  # the least exposed time, summed over the jobs


def link_of(job: Job, span: int) -> tuple[float, float]:
    """Bandwidth and latency of a group that spans this many neighbors."""
    return job.inside if span <= job.node else job.between


def choices(job: Job) -> list[int]:
    """Values of u that divide the numbers of ranks, heads and key-value heads."""
    counts = (job.ranks, job.heads, job.kv_heads)
    return [u for u in range(1, job.ranks + 1) if not any(count % u for count in counts)]


def exposed_us(job: Job, u: int) -> float:
    """Microseconds that a rank waits in forward and backward."""
    seconds = 0.0
    ring, block = job.ranks // u, job.sequence // (job.ranks // u)
    if u > 1:
        bytes_per_s, alpha_s = link_of(job, u)
        sent = ulysses_bytes(block, job.rows, job.heads, job.kv_heads, job.head_width, u)
        seconds += 2 * (4 * alpha_s + sent / bytes_per_s)
    bytes_per_s, alpha_s = link_of(job, job.ranks)
    for backward in (False, True):
        seconds += ring_exposed_s(
            block, job.rows, job.heads // u, job.kv_heads // u, job.head_width, ring,
            job.flops_per_s, bytes_per_s, alpha_s, backward=backward,
        )  # fmt: skip
    return 1e6 * seconds
