"""What each kind of parallelism sends in one step of a transformer.

    data      one all-reduce of all gradients        2(n-1)/n P g               O(w² l)
    tensor    four all-reduces of x in each layer    4 l 2(t-1)/t b s w g       O(b s w l)
    pipeline  x and its gradient at each cut         2 (l/k - 1) b s w g        O(b s w l / k)

Legend: w width, l layers, k layers of a stage, b rows (all micro-batches of the step together),
s positions, P about 12 l w² parameters, g bytes of an element; n and t ranks. Data and tensor are
what one rank sends (`bus_bytes`); pipeline is what all stages send, which are 1/k of the layers: a
stage in the middle sends x to the next and a gradient back to the one before, 2 b s w g.

So tensor parallelism sends the most often and the most, where b s is large against w; gradients
do not grow with the batch; and a pipeline's cut is the cheapest. Which is why the first goes over
the fastest wires, and the last over the slowest.

Sources: data, Li et al., arXiv 2006.15704, section 3; tensor, Shoeybi et al. (Megatron-LM), arXiv
1909.08053, section 3, figure 4; tensor and pipeline, Narayanan et al., arXiv 2104.04473,
section 3.2.
"""

from labkit.predict.sizes import check_counts, check_divides, check_not_negative
from labkit.predict.wires import bus_factor


def data_parallel_bytes(parameters: float, ranks: int, element_bytes: int = 4) -> float:
    """What one rank sends in a step, to average `parameters` gradients over `ranks`: their
    `bus_bytes`, the mean over the ranks where nothing divides. The same for every stage of ZeRO
    but the third, which sends half as much again.

    Source: arXiv 2006.15704, section 3; for ZeRO, arXiv 1910.02054, section 7."""
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
) -> float:
    """What one rank sends in a step where `ranks` share every layer: two all-reduces of
    [rows, sequence, width] in forward, after attention and MLP, and two in backward; with full
    recomputation two more. Embedding and head are left out. With sequence parallelism each
    all-reduce is a reduce-scatter and an all-gather, which send the same.

    Source: arXiv 1909.08053, section 3; arXiv 2104.04473, section 3.2."""
    check_counts(depth=depth)
    all_reduces = depth * (6 if recompute else 4)
    x_bytes = stage_boundary_bytes(sequence, rows, width, element_bytes)
    return all_reduces * bus_factor("all_reduce", ranks) * x_bytes


def pipeline_parallel_bytes(
    sequence: int,
    rows: int,
    width: int,
    depth: int,
    layers_per_stage: int,
    element_bytes: int = 2,
) -> int:
    """What all stages together send in a step, `rows` being those of all its micro-batches: at each
    of the depth / layers_per_stage - 1 cuts x forward, and its gradient backward. When
    interleaved, there is a cut after each chunk: give its layers.

    Source: arXiv 2104.04473, section 3.2, and 2.2.2 for chunks."""
    check_counts(depth=depth, layers_per_stage=layers_per_stage)
    check_divides("depth", depth, "layers_per_stage", layers_per_stage)
    cuts = depth // layers_per_stage - 1
    return 2 * cuts * stage_boundary_bytes(sequence, rows, width, element_bytes)


def stage_boundary_bytes(sequence: int, rows: int, width: int, element_bytes: int = 2) -> int:
    """Of x, [rows, sequence, width], between two layers: one message of a pipeline."""
    check_counts(sequence=sequence, rows=rows, width=width, element_bytes=element_bytes)
    return rows * sequence * width * element_bytes
