"""What each kind of parallelism sends in one step of a transformer, and the time of a collective.

    data      one all-reduce of all gradients        2(n-1)/n P g               O(w² l)
    tensor    four all-reduces of x in each layer    8(t-1)/t b s w g l         O(b s w l)
              sequence parallel: parts are kept     10(t-1)/t b s w g l
    pipeline  x and its gradient at each cut         2 (l/k - 1) b s w g        O(b s w l / k)

Legend: w width, l layers, k layers of a stage, b rows (all micro-batches of the step together),
s positions, P about 12 l w² parameters, g bytes of an element; n and t ranks. Data and tensor are
what one rank sends (`bus_bytes`); pipeline is what all stages send.

    least_s        S / B x bus factor     the lower bound: bandwidth alone
    algorithm_s    steps x alpha + ...    a given algorithm: the alpha-beta model

Legend: S bytes of the operation (for all-gather and reduce-scatter of all n shards together),
B bytes per second out of a rank. Costs of algorithms are in labkit/comm/collectives/costs.py.

Sources: bus factors, nccl-tests, doc/PERFORMANCE.md; data, Li et al., arXiv 2006.15704, section 3;
tensor, Shoeybi et al. (Megatron-LM), arXiv 1909.08053, section 3, figure 4; tensor and pipeline,
Narayanan et al., arXiv 2104.04473, section 3.2.
"""

from labkit.predict.sizes import check_counts, check_divides, check_not_negative, check_positive

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
    """Bus bandwidth over algorithm bandwidth, and the part of S that each rank must send (the root,
    for broadcast and reduce).

    In "all_reduce_in_network" the switches sum (SHARP): its factor is no bound, each rank sends S.
    Source: nccl-tests, doc/PERFORMANCE.md. Raises ValueError for an unknown collective."""
    check_counts(ranks=ranks)
    if collective not in BUS_FACTORS:
        raise ValueError(
            f"collective={collective!r} has no factor; choose one of {', '.join(BUS_FACTORS)}"
        )
    return BUS_FACTORS[collective](ranks)


def least_s(collective: str, ranks: int, nbytes: float, bytes_per_s: float) -> float:
    """Seconds that `collective` takes at least over wires of `bytes_per_s` out of a rank: S / B x
    bus factor, with S bytes of the operation (for all-gather and reduce-scatter of all n shards
    together). Source: nccl-tests, doc/PERFORMANCE.md."""
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
    """Seconds that an algorithm of labkit takes, as algorithm_s("all_reduce", "ring", 8, ...):
    steps x alpha, and bytes. `alpha_s`: latency of a message; `reduced_bytes_per_s`: how fast a
    rank adds, by default in no time.

    Source: Hockney's alpha-beta model; that of each algorithm is in its file, in
    labkit/comm/collectives/. Raises ValueError for an unknown collective or algorithm."""
    from labkit.comm.collectives.costs import COSTS, cost  # here: labkit.comm imports torch

    check_counts(ranks=ranks)
    check_not_negative(nbytes=nbytes, alpha_s=alpha_s)
    check_positive(bytes_per_s=bytes_per_s, reduced_bytes_per_s=reduced_bytes_per_s)
    if algorithm not in COSTS.get(collective, {}):
        known = (f"{name}: {', '.join(ways)}" for name, ways in COSTS.items())
        raise ValueError(f"no cost of {collective} by {algorithm!r}; known are {'; '.join(known)}")
    total = cost(collective, algorithm, ranks, nbytes)
    return total.seconds(alpha_s, 1 / bytes_per_s, 1 / reduced_bytes_per_s)


# ---- a training step


def data_parallel_bytes(parameters: float, ranks: int, element_bytes: int = 4) -> float:
    """What one rank sends in a step, to average `parameters` gradients over `ranks`; the same for
    every stage of ZeRO but the third, which sends half as much again. Source: Li et al., arXiv
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
    """What one rank sends in a step where `ranks` share every layer, without embedding and head
    (`vocab_parallel_bytes`). In (t-1)/t b s w elements a layer, half an all-reduce:

        tensor parallel      8     two all-reduces of x in forward, two in backward
        sequence parallel   10     each of them as a reduce-scatter and an all-gather; and of two
                                   inputs only the part is kept, gathered again in backward
                             8     with `kept_whole` they are not
        full recomputation  +4     forward once more; labkit.Recompute stops at the last tensor it
                                   needs, which saves the last collective if there is no dropout

    Source: Shoeybi et al. (Megatron-LM), arXiv 1909.08053, section 3, figure 4; Narayanan et al.,
    arXiv 2104.04473, section 3.2; arXiv 2205.05198, section 4.2.2."""
    check_counts(depth=depth)
    if kept_whole and not sequence_parallel:
        raise ValueError("kept_whole is of sequence parallelism: else inputs are whole anyway")
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
    """What one rank sends in a step for an embedding, head and loss whose vocabulary is sharded
    over `ranks`: all-reduces of x, [rows, sequence, width], one forward after the embedding and one
    backward before the head, and for the loss one of three elements a token, in float32. With
    sequence parallelism the head keeps its shard of x, and gathers it again in backward.

    Source: arXiv 1909.08053, section 3."""
    check_counts(loss_element_bytes=loss_element_bytes)
    halves = 4 + sequence_parallel
    x_bytes = stage_boundary_bytes(sequence, rows, width, element_bytes)
    loss_bytes = 3 * sequence * rows * loss_element_bytes
    return bus_factor("all_gather", ranks) * (halves * x_bytes + 2 * loss_bytes)


def gathered_logits_bytes(
    sequence: int, rows: int, vocab: int, ranks: int, element_bytes: int = 2
) -> float:
    """What one rank sends where all logits are gathered on every rank instead: v elements a token
    (padded to a multiple of the ranks) in the place of three. Source: arXiv 1909.08053, section 3.
    """
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
    """What all stages together send in a step, `rows` being those of all its micro-batches: at each
    of the depth / layers_per_stage - 1 cuts x forward, and its gradient backward. When interleaved,
    there is a cut after each chunk: give its layers. Source: arXiv 2104.04473, section 3.2, and
    2.2.2 for chunks."""
    check_counts(depth=depth, layers_per_stage=layers_per_stage)
    check_divides("depth", depth, "layers_per_stage", layers_per_stage)
    cuts = depth // layers_per_stage - 1
    return 2 * cuts * stage_boundary_bytes(sequence, rows, width, element_bytes)


def stage_boundary_bytes(sequence: int, rows: int, width: int, element_bytes: int = 2) -> int:
    """Bytes of x, [rows, sequence, width], between two layers: one message of a pipeline."""
    check_counts(sequence=sequence, rows=rows, width=width, element_bytes=element_bytes)
    return rows * sequence * width * element_bytes
