"""Context parallelism: the bytes that attention sends, and when compute hides the ring's messages.

              forward                          backward: as in forward, plus
    ring      (n-1) blocks of k and v          (n-1) blocks of their gradients, in fp32
    Ulysses   4 all-to-alls: q, k, v, out      nothing

The ring computes on one block while the next is in flight. With zig-zag shards of L = s/n tokens,
each of h heads computes L²/2 scores per step, at 4e FLOPs in forward (q kᵀ, then times v) and 10e
in backward (five matmuls); a block has 2 b g L e elements:

    computing   2 b h e L² / F        sending   α + 2 b g L e · g₁ / B

so without latency the forward hides the messages if L is at least g₁ F g / (B h), for any head
width and number of rows: twice the L of Liu et al., who use no causal mask. In backward, the last
block's gradients, which return to the block's rank, are always exposed.

Legend: b rows, h heads, g key-value heads, s positions, e head width, n ranks; g₁ bytes per
element, F FLOPs and B bytes per second, α latency per message.
"""

import math

from labkit.predict.collectives import bus_factor
from labkit.predict.sizes import check_counts, check_divides, check_not_negative, check_positive

FORWARD, BACKWARD = 2, 5  # matmuls per score


def ring_attention_bytes(
    sequence: int,
    rows: int,
    kv_heads: int,
    head_width: int,
    ranks: int,
    element_bytes: int = 2,
    backward: bool = False,
) -> int:
    """Bytes that one rank sends in one layer's forward, n-1 blocks of k and v; or in `backward`,
    these blocks again and n-1 blocks of gradients, in fp32, or k's dtype if wider. Source: Liu et
    al., arXiv 2310.01889, section 3; in labkit, a rank keeps the gradients of its own k and v."""
    check_counts(sequence=sequence, rows=rows, kv_heads=kv_heads, head_width=head_width)
    check_counts(ranks=ranks, element_bytes=element_bytes)
    check_divides("sequence", sequence, "ranks", ranks)
    each_bytes = element_bytes + max(4, element_bytes) if backward else element_bytes
    return (ranks - 1) * 2 * rows * kv_heads * (sequence // ranks) * head_width * each_bytes


def ulysses_bytes(
    sequence: int,
    rows: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    ranks: int,
    element_bytes: int = 2,
) -> int:
    """Bytes that one rank sends in one layer's forward, and again in its backward: all-to-alls of
    q, k, v and the result, (n-1)/n of each. Source: Jacobs et al., arXiv 2309.14509, section 3."""
    check_counts(sequence=sequence, rows=rows, heads=heads, kv_heads=kv_heads)
    check_counts(head_width=head_width, ranks=ranks, element_bytes=element_bytes)
    check_divides("sequence", sequence, "ranks", ranks)
    check_divides("heads", heads, "ranks", ranks)
    check_divides("kv_heads", kv_heads, "ranks", ranks)
    one_head_bytes = rows * (sequence // ranks) * head_width * element_bytes
    return round(bus_factor("all_to_all", ranks) * 2 * (heads + kv_heads) * one_head_bytes)


def ring_step_scores(block: int, heads: int, rows: int, own: bool = False) -> float:
    """Scores per rank and step with a zig-zag block of `block` tokens: half of all pairs, plus half
    the diagonal for the rank's `own` block. Source: arXiv 2407.21783, section 3.3.2."""
    check_counts(block=block, heads=heads, rows=rows)
    return rows * heads * (block * (block + 1) if own else block * block) / 2


def ring_exposed_s(
    block: int,
    rows: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    ranks: int,
    flops_per_s: float,
    bytes_per_s: float,
    alpha_s: float = 0.0,
    element_bytes: int = 2,
    backward: bool = False,
) -> float:
    """Seconds that a rank waits for the ring in one layer's forward or `backward`. Each of the n-1
    blocks is sent while a step computes; in backward, from the third step on, so are the gradients
    of the previous block. `block`: tokens per rank, s/n; `bytes_per_s`, `alpha_s`: of the link.
    Source: arXiv 2310.01889, section 3; the sum over the steps is labkit's, checked by a replay."""
    check_counts(kv_heads=kv_heads, head_width=head_width, ranks=ranks, element_bytes=element_bytes)
    check_positive(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
    check_not_negative(alpha_s=alpha_s)
    score_s = 2 * (BACKWARD if backward else FORWARD) * head_width / flops_per_s
    own_s, other_s = (ring_step_scores(block, heads, rows, own) * score_s for own in (True, False))
    elements = 2 * rows * kv_heads * block * head_width
    block_s = alpha_s + elements * element_bytes / bytes_per_s
    if ranks == 1:
        return 0.0
    exposed_s = max(0.0, block_s - own_s)  # the first step; the last step sends no block
    if not backward:
        return exposed_s + (ranks - 2) * max(0.0, block_s - other_s)
    gradient_s = alpha_s + elements * max(4, element_bytes) / bytes_per_s
    if ranks > 2:  # step 1 hides a block, the last step gradients, and all other steps both
        exposed_s += max(0.0, block_s - other_s) + max(0.0, gradient_s - other_s)
        exposed_s += (ranks - 3) * max(0.0, block_s + gradient_s - other_s)
    return exposed_s + gradient_s  # gradients returning to their rank


def ring_hides_from(
    heads: int,
    kv_heads: int,
    head_width: int,
    flops_per_s: float,
    bytes_per_s: float,
    rows: int = 1,
    alpha_s: float = 0.0,
    element_bytes: int = 2,
) -> float:
    """The fewest tokens per block (s/n) for which the forward's `ring_exposed_s` is 0. (Two ranks
    need fewer: only the longer diagonal step must hide a block.) Source: Liu et al., arXiv
    2310.01889, section 3 (L = F / B for 2-byte dtypes), extended to latency and a causal mask."""
    check_counts(heads=heads, kv_heads=kv_heads, head_width=head_width, rows=rows)
    check_counts(element_bytes=element_bytes)
    check_positive(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
    check_not_negative(alpha_s=alpha_s)
    # a L² = α + c L: computing and sending a block
    a = FORWARD * rows * heads * head_width / flops_per_s
    c = 2 * rows * kv_heads * head_width * element_bytes / bytes_per_s
    return (c + math.sqrt(c * c + 4 * a * alpha_s)) / (2 * a)
