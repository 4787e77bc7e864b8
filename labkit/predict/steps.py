"""The time of one step of data parallelism, and of a model whose weights come over a bus.

DDP with k equal buckets of gradients: each leaves when backward has filled it and the one before
has left, F + max(B + C/k, B/k + C) in all. Many buckets come near F + max(B, C); one bucket hides
nothing, F + B + C.

    backward   [ fill 0 ][ fill 1 ][ fill 2 ]                     each B/k
    wire                 [    send 0    ][    send 1    ][    send 2    ]      each C/k

Weights over a bus, block by block; L is what a block's weights take, C what it computes:

    load, then run    sum of L + sum of C
    pipelined         L + (n - 1) max(L, C) + C          for n blocks alike, and ahead >= 1
    in place          sum of max(r L, C)                 weights read r times as a block computes

A second block ahead helps only where blocks differ. Left out: that a kernel and a copy slow each
other in the same memory. Sources: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 6.2
(overlap-centric design); Sheng et al., FlexGen, arXiv 2303.06865, section 4 (a cost model of the
same form).
"""

from collections.abc import Sequence

from labkit.predict.sizes import check_counts, check_not_negative, check_positive


def compute_s(flops: float, flops_per_s: float, ranks: int = 1) -> float:
    """Seconds to compute `flops`, shared by `ranks` that do `flops_per_s` each.

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
    """Seconds of one step of DDP whose buckets travel while backward runs.

    Args:
        communication_s: of all gradients together, latency of every bucket included.
        buckets: of equal bytes, which backward fills in equal times. Those of a real model differ
            (the embedding's is large, and comes last): a replay takes them as they are.

    Source: the overlap of Li et al., arXiv 2006.15704, section 3.2.3; a flow shop of two machines
    and equal jobs (Johnson, 1954)."""
    check_not_negative(forward_s=forward_s, backward_s=backward_s, optimizer_s=optimizer_s)
    check_not_negative(communication_s=communication_s)
    check_counts(buckets=buckets)
    fill_s, send_s = backward_s / buckets, communication_s / buckets
    return forward_s + max(backward_s + send_s, fill_s + communication_s) + optimizer_s


def ddp_step_without_overlap_s(
    forward_s: float, backward_s: float, communication_s: float, optimizer_s: float = 0.0
) -> float:
    """Seconds of a step whose gradients travel after backward, as NaiveDDP's do: the sum."""
    return ddp_step_s(forward_s, backward_s, communication_s, 1, optimizer_s)


def mfu(flops: float, step_s: float, peak_flops_per_s: float, ranks: int = 1) -> float:
    """Model FLOPs utilisation, 0 to 1: what the model asks for, over what the devices could do.

    Args:
        flops: of one step of all ranks, `step_flops(...)` for the whole batch, without `recompute`
            and `flash` (with them it is hardware utilisation, as the 52 % in arXiv 2104.04473).
        peak_flops_per_s: of one device, for the dtype that is computed in, dense.

    Source: Chowdhery et al., "PaLM", arXiv 2204.02311, section 4.1 and appendix B."""
    check_not_negative(flops=flops)
    check_positive(step_s=step_s, peak_flops_per_s=peak_flops_per_s)
    check_counts(ranks=ranks)
    return flops / (step_s * peak_flops_per_s * ranks)


# ---- weights over a bus


def load_then_run_s(load_s: Sequence[float], compute_s: Sequence[float]) -> float:
    """Seconds until all blocks are loaded, and then have computed."""
    _check(load_s, compute_s)
    return sum(load_s) + sum(compute_s)


def pipelined_loading_s(
    load_s: Sequence[float], compute_s: Sequence[float], ahead: int = 1
) -> float:
    """Seconds where blocks are loaded `ahead` of the one that computes, in `ahead` + 1 buffers. A
    load begins when the one before is over and its buffer is free, a block when its load is over
    and the block before has computed.

    >>> pipelined_loading_s([2.0] * 4, [3.0] * 4)
    14.0
    >>> pipelined_loading_s([1.0, 1.0, 5.0], [3.0, 3.0, 1.0], ahead=2)  # 10.0 with one ahead
    8.0
    """
    _check(load_s, compute_s)
    check_counts(ahead=ahead)
    loaded_s = 0.0
    computed_s: list[float] = []
    for k, (load, compute) in enumerate(zip(load_s, compute_s)):
        free_s = computed_s[k - ahead - 1] if k > ahead else 0.0
        loaded_s = max(loaded_s, free_s) + load
        computed_s.append(max(loaded_s, computed_s[-1] if k else 0.0) + compute)
    return computed_s[-1]


def in_place_s(load_s: Sequence[float], compute_s: Sequence[float], reads: int = 1) -> float:
    """Seconds where each block reads its weights over the bus as it computes, `reads` times.

    >>> in_place_s([2.0] * 4, [3.0] * 4), in_place_s([2.0] * 4, [3.0] * 4, reads=4)
    (12.0, 32.0)
    """
    _check(load_s, compute_s)
    check_counts(reads=reads)
    return sum(max(reads * load, compute) for load, compute in zip(load_s, compute_s))


def _check(load_s: Sequence[float], compute_s: Sequence[float]) -> None:
    if len(load_s) != len(compute_s) or not load_s:
        counts = f"load_s has {len(load_s)} blocks, compute_s {len(compute_s)}"
        raise ValueError(f"{counts}: give both for each block, of one or more")
    for load, compute in zip(load_s, compute_s):
        check_not_negative(load_s=load, compute_s=compute)
