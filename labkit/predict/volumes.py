"""The bytes that each kind of parallelism sends in one step of a transformer.

    data      one all-reduce of all gradients        2(n-1)/n P g               O(w² l)
    tensor    four all-reduces of x in each layer    8(t-1)/t b s w g l         O(b s w l)
              sequence parallel, inputs as shards   10(t-1)/t b s w g l
    pipeline  x and its gradient at each cut         2 (l/k - 1) b s w g        O(b s w l / k)

Legend: w width, l layers, k layers per stage, b rows (all micro-batches of the step together), s
positions, P about 12 l w² parameters, g bytes per element; n and t ranks. The data and tensor rows
count bytes per rank (`bus_bytes`), the pipeline row the bytes of all stages.
"""

from labkit.predict.collectives import bus_factor
from labkit.predict.sizes import check_counts, check_divides, check_not_negative


def data_parallel_bytes(parameters: float, ranks: int, element_bytes: int = 4) -> float:
    """Bytes that one rank sends in a step to average `parameters` gradients over `ranks`; ZeRO
    stage 3 sends 1.5 times that, other stages the same. Source: Li et al., arXiv
    2006.15704, section 3; for ZeRO, arXiv 1910.02054, section 7."""
    check_not_negative(parameters=parameters)
    check_counts(element_bytes=element_bytes)
    return bus_factor("all_reduce", ranks) * parameters * element_bytes


def tensor_parallel_bytes(
    sequence: int,
    rows: int,
    width: int,
    depth: int,
    ranks: int,
    element_bytes: int = 2,
    recompute: bool = False,
    sequence_parallel: bool = False,
    kept_whole: bool = False,
) -> float:
    """Bytes that one rank sends in a step if `ranks` shard every layer; embedding and head add
    `vocab_parallel_bytes`. In units of (t-1)/t b s w elements per layer, half an all-reduce:

        tensor parallel      8     two all-reduces of x in forward, two in backward
        sequence parallel   10     each split into reduce-scatter and all-gather; two inputs kept
                                   as shards, and gathered again in backward
                             8     with `kept_whole`: no inputs kept as shards
        full recomputation  +4     forward once more; labkit.Recompute stops at the last tensor that
                                   backward needs, and skips the last collective if dropout is 0

    Source: Shoeybi et al. (Megatron-LM), arXiv 1909.08053, section 3, figure 4; Narayanan et al.,
    arXiv 2104.04473, section 3.2; arXiv 2205.05198, section 4.2.2."""
    check_counts(depth=depth)
    if kept_whole and not sequence_parallel:
        raise ValueError("kept_whole needs sequence_parallel=True; otherwise inputs are whole")
    halves = 8 + 2 * (sequence_parallel and not kept_whole) + 4 * recompute
    x_bytes = stage_boundary_bytes(sequence, rows, width, element_bytes)
    return depth * halves * bus_factor("all_gather", ranks) * x_bytes


def vocab_parallel_bytes(
    sequence: int,
    rows: int,
    width: int,
    ranks: int,
    element_bytes: int = 2,
    loss_element_bytes: int = 4,
    sequence_parallel: bool = False,
) -> float:
    """Bytes that one rank sends in a step for embedding, head and loss with a vocabulary sharded
    over `ranks`: all-reduces of x, [rows, sequence, width], in forward after the embedding and in
    backward at the head's input, and of three fp32 elements per token for the loss. With sequence
    parallelism, the head gathers x again in backward. Source: arXiv 1909.08053, section 3."""
    check_counts(loss_element_bytes=loss_element_bytes)
    halves = 4 + sequence_parallel
    x_bytes = stage_boundary_bytes(sequence, rows, width, element_bytes)
    loss_bytes = 3 * sequence * rows * loss_element_bytes
    return bus_factor("all_gather", ranks) * (halves * x_bytes + 2 * loss_bytes)


def gathered_logits_bytes(
    sequence: int, rows: int, vocab: int, ranks: int, element_bytes: int = 2
) -> float:
    """Bytes that one rank sends to gather all logits on every rank: v elements per token (padded to
    a multiple of the ranks) instead of three. Source: arXiv 1909.08053, section 3."""
    check_counts(
        sequence=sequence, rows=rows, vocab=vocab, element_bytes=element_bytes, ranks=ranks
    )
    padded = -(-vocab // ranks) * ranks
    return bus_factor("all_gather", ranks) * rows * sequence * padded * element_bytes


def pipeline_parallel_bytes(
    sequence: int,
    rows: int,
    width: int,
    depth: int,
    layers_per_stage: int,
    element_bytes: int = 2,
) -> int:
    """Bytes that all stages send in a step with `rows` over all micro-batches: x and its
    gradient at each of the depth / layers_per_stage - 1 cuts. If interleaved, pass the layers per
    chunk. Source: Narayanan et al., arXiv 2104.04473, sections 3.2 and 2.2.2 (chunks)."""
    check_counts(depth=depth, layers_per_stage=layers_per_stage)
    check_divides("depth", depth, "layers_per_stage", layers_per_stage)
    cuts = depth // layers_per_stage - 1
    return 2 * cuts * stage_boundary_bytes(sequence, rows, width, element_bytes)


def stage_boundary_bytes(sequence: int, rows: int, width: int, element_bytes: int = 2) -> int:
    """Bytes of x, [rows, sequence, width], between two layers: one message of a pipeline."""
    check_counts(sequence=sequence, rows=rows, width=width, element_bytes=element_bytes)
    return rows * sequence * width * element_bytes
