"""The bytes that each axis of a mesh carries in one training step of a GPT: Mesh(pp=, dp=, tp=).

    x has S = b s w g bytes, over all m micro-batches of one replica (b rows). One rank sends

    tensor      each block   8 (t-1)/t S    10 with sequence parallelism   + 2 to 4 if recomputed
                embedding    2              2
                head         2              3         + V/w if it gathers the logits
                sequence parallelism all-reduces the gradients of norms, biases and positions, too
    pipeline    per boundary, S forward and S back; S/t with sequence parallelism, or with
                scatter/gather, which then gathers (t-1)/t S over tensor
    data        G bytes of gradients, for 1/t of the stage:     DDP, ZeRO-1   2 (d-1)/d G
                                                                ZeRO-2    (m+1) (d-1)/d G
                                                                ZeRO-3       3m (d-1)/d G
    embedding   if tied, on the first and last stage: V w g / t; with ZeRO, 1/d of that

Legend: s positions, w width, g bytes per element, V the vocabulary rounded up to a multiple of t; d
and t: data and tensor ranks. Sources: Narayanan et al., arXiv 2104.04473, section 3.2 (pipeline
b s h; tensor 8 b s h (t-1)/t per layer) and 4.1 (scatter/gather); Korthikanti et al., arXiv
2205.05198, section 4.2.2; Rajbhandari et al., arXiv 1910.02054, section 7 (ZeRO-2 sends gradients,
ZeRO-3 weights per micro-batch, as in labkit's pipeline); embedding groups: Megatron-LM.
"""

from labkit.events import chunk_sizes
from labkit.predict.sizes import check_counts
from labkit.predict.volumes import stage_boundary_bytes

AXES = ("tensor", "pipeline", "data", "embedding")


def bytes_by_axis(
    *,
    vocab: int,
    width: int,
    depth: int,
    context: int,
    rows: int,
    sequence: int,
    microbatches: int = 1,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    chunks: int = 1,
    zero: int = 0,
    sequence_parallel: bool = False,
    recompute: bool = False,
    dropout: bool = False,
    scatter_gather: bool = False,
    gather_logits: bool = True,
    tied: bool = True,
    key_width: int | None = None,
    element_bytes: int = 2,
) -> list[dict[str, float]]:
    """Bus bytes that each stage sends along each axis in a step, averaged over its ranks.

    Args:
        rows, sequence: one replica's batch over all micro-batches, the global batch / dp.
        chunks: model chunks per stage; the blocks are split into pp * chunks, larger chunks first.
        zero: 0 for DDP, or the ZeRO stage over dp.
        recompute: rerun each block up to the last tensor that backward needs (labkit.Recompute).
        dropout: whether blocks have dropout; recompute then repeats their last collective, too.
        scatter_gather: see above; no effect with sequence parallelism.
        key_width: width of the GPT's keys; `width` by default.
        element_bytes: bytes per element of activations, weights and gradients when they are sent.

    ZeRO pads each bucket to dp equal shares. The formula pads each block in stage 3, and otherwise
    all parameters of a rank as one bucket. It omits the scalars of clipping and loss scaling.

    >>> gpt = dict(vocab=51200, width=12288, depth=96, context=2048)
    >>> gpt3 = bytes_by_axis(**gpt, rows=96, sequence=2048, microbatches=96, pp=8, dp=16, tp=8)
    >>> {axis: f"{sent / 2**30:.1f} GiB" for axis, sent in gpt3[1].items()}
    {'tensor': '378.0 GiB', 'pipeline': '9.0 GiB', 'data': '9.5 GiB', 'embedding': '0.0 GiB'}
    """
    check_counts(vocab=vocab, width=width, depth=depth, context=context, microbatches=microbatches)
    keys = width if key_width is None else key_width
    check_counts(pp=pp, dp=dp, tp=tp, chunks=chunks, key_width=keys)
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero}: choose 0 for DDP, or a ZeRO stage, 1 to 3")
    if depth < pp * chunks:
        raise ValueError(
            f"depth={depth}: {pp * chunks} stages (pp x chunks) need at least one block each; "
            "choose fewer stages"
        )
    x_bytes = stage_boundary_bytes(sequence, rows, width, element_bytes)
    padded = -(-vocab // tp) * tp
    table = padded // tp * width  # elements, on one rank
    is_sharded = sequence_parallel and tp > 1  # whether x is sharded by positions
    scatters = scatter_gather and not is_sharded
    blocks = chunk_sizes(depth, pp * chunks)
    # Half all-reduces of x per block: gathers and scatters count once, all-reduces twice.
    again = (4 if dropout else 2 + is_sharded) if recompute else 0
    halves = (10 if is_sharded else 8) + again
    sent = []
    for stage in range(pp):
        own_blocks, first, last = sum(blocks[stage::pp]), stage == 0, stage == pp - 1
        is_tied = tied and pp > 1 and (first or last)
        boundaries = 0 if pp == 1 else 2 * chunks - first - last

        units = own_blocks * halves + 2 * first + (3 if is_sharded else 2) * last
        tensor = (units + (boundaries if scatters else 0)) * x_bytes
        if last and gather_logits:
            tensor += rows * sequence * padded * element_bytes
        if is_sharded:
            elements = 6 * width * own_blocks + first * context * width + last * 2 * width
            tensor += 2 * microbatches * elements * element_bytes

        # Matrices and column-sharded biases are sharded; norms, biases of `out` and `down` are not.
        matrices = 10 * width**2 + 2 * width * keys
        own = [table, context * width] if first else []
        own += [(matrices + 5 * width + 2 * keys) // tp + 6 * width] * own_blocks
        if last:
            own += [2 * width] if tied and first else [2 * width, table]
        together = [sum(own) - is_tied * table, is_tied * table]
        weights = own if zero == 3 else together if zero else [sum(own)]
        times = {0: 2, 1: 2, 2: microbatches + 1, 3: 3 * microbatches}[zero]
        elements = sum(_padded(n, dp if zero else 1) for n in weights)
        shared = _padded(table, dp) / dp if zero else table
        sent.append({
            "tensor": (tp - 1) / tp * tensor,
            "pipeline": boundaries * x_bytes / (tp if is_sharded or scatters else 1),
            "data": times * (dp - 1) / dp * elements * element_bytes,
            "embedding": float(is_tied * shared * element_bytes),
        })  # fmt: skip
    return sent


def _padded(elements: int, parts: int) -> int:
    return -(-elements // parts) * parts
