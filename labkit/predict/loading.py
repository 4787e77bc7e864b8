"""Run time of a model whose weights are loaded over a bus, block by block.

    load, then run    sum of L + sum of C
    pipelined         L + (n - 1) max(L, C) + C          for n equal blocks, and ahead >= 1
    in place          sum of max(r L, C)                 weights read r times while a block computes

L is a block's time on the bus, and C is its compute time. If pipelined, block k + ahead is loaded
into the buffer of block k - 1 as soon as block k - 1 has computed:

    load k begins     when load k-1 is done, and block k-ahead-1 has computed
    block k begins    when load k is done, and block k-1 has computed

A second block ahead helps only if blocks differ. Omitted: contention between kernels and copies.

Sources: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 6.2 (overlap-centric design);
Sheng et al., FlexGen, arXiv 2303.06865, section 4 (a cost model of the same form).
"""

from collections.abc import Sequence

from labkit.predict.sizes import check_counts, check_not_negative


def load_then_run_s(load_s: Sequence[float], compute_s: Sequence[float]) -> float:
    """Seconds if all blocks are loaded before the first one computes."""
    _check(load_s, compute_s)
    return sum(load_s) + sum(compute_s)


def pipelined_loading_s(
    load_s: Sequence[float], compute_s: Sequence[float], ahead: int = 1
) -> float:
    """Seconds if blocks are loaded `ahead` blocks before their compute, into `ahead` + 1 buffers.

    >>> pipelined_loading_s([2.0] * 4, [3.0] * 4)
    14.0
    >>> pipelined_loading_s([1.0, 1.0, 5.0], [3.0, 3.0, 1.0], ahead=2)  # 10.0 with ahead=1
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
    """Seconds if each block reads its weights over the bus `reads` times while it computes.

    >>> in_place_s([2.0] * 4, [3.0] * 4), in_place_s([2.0] * 4, [3.0] * 4, reads=4)
    (12.0, 32.0)
    """
    _check(load_s, compute_s)
    check_counts(reads=reads)
    return sum(max(reads * load, compute) for load, compute in zip(load_s, compute_s))


def _check(load_s: Sequence[float], compute_s: Sequence[float]) -> None:
    if len(load_s) != len(compute_s) or not load_s:
        counts = f"load_s has {len(load_s)} blocks, compute_s {len(compute_s)}"
        raise ValueError(f"{counts}: pass both times for each block")
    for load, compute in zip(load_s, compute_s):
        check_not_negative(load_s=load, compute_s=compute)
