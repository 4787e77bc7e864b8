"""The time of one data-parallel step, and how well it uses the machine.

DDP sends k equal buckets one after another, each once it is full. With forward F, backward B and
communication C, a step takes F + max(B + C/k, B/k + C): F + B + C if k = 1, at best F + max(B, C).

    backward   [ fill 0 ][ fill 1 ][ fill 2 ]                     each B/k
    link                 [    send 0    ][    send 1    ][    send 2    ]      each C/k
"""

from labkit.predict.sizes import check_counts, check_not_negative, check_positive


def compute_s(flops: float, flops_per_s: float, ranks: int = 1) -> float:
    """Seconds to compute `flops` on `ranks` ranks of `flops_per_s` each.

    >>> compute_s(flops=6e15, flops_per_s=150e12, ranks=8)
    5.0
    """
    check_not_negative(flops=flops)
    check_positive(flops_per_s=flops_per_s)
    check_counts(ranks=ranks)
    return flops / (flops_per_s * ranks)


def ddp_step_s(
    forward_s: float,
    backward_s: float,
    communication_s: float,
    buckets: int = 1,
    optimizer_s: float = 0.0,
) -> float:
    """Seconds of a DDP step that sends `buckets` buckets of equal size and fill time in backward.
    (In a real model, the embedding's bucket is large and last; use a replay.) `communication_s`:
    sum over buckets, with latencies. Source: the overlap of Li et al., arXiv 2006.15704, section
    3.2.3; a flow shop of two machines and equal jobs (Johnson, 1954)."""
    check_not_negative(forward_s=forward_s, backward_s=backward_s, optimizer_s=optimizer_s)
    check_not_negative(communication_s=communication_s)
    check_counts(buckets=buckets)
    fill_s, send_s = backward_s / buckets, communication_s / buckets
    return forward_s + max(backward_s + send_s, fill_s + communication_s) + optimizer_s


def ddp_step_without_overlap_s(
    forward_s: float, backward_s: float, communication_s: float, optimizer_s: float = 0.0
) -> float:
    """Seconds of a step that sends gradients only after backward, as NaiveDDP does."""
    return ddp_step_s(forward_s, backward_s, communication_s, 1, optimizer_s)


def mfu(flops: float, step_s: float, peak_flops_per_s: float, ranks: int = 1) -> float:
    """Model FLOPs utilization, 0 to 1: the model's FLOPs divided by the FLOPs possible at peak.
    `flops`: one step on all ranks, `step_flops(...)` for the whole batch, without `recompute` or
    `flash` (with both, the result is hardware utilization, like the 52 % of arXiv 2104.04473).
    `peak_flops_per_s`: one device's dense peak for the dtype of the computation. Source: Chowdhery
    et al., "PaLM", arXiv 2204.02311, section 4.1 and appendix B."""
    check_not_negative(flops=flops)
    check_positive(step_s=step_s, peak_flops_per_s=peak_flops_per_s)
    check_counts(ranks=ranks)
    return flops / (step_s * peak_flops_per_s * ranks)
