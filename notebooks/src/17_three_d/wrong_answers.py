from collections.abc import Iterator
from itertools import permutations

import torch

from answers import Solution, right, wrong
from labkit.comm.mesh import factorizations

from .placement import AXES, Job, leaving_bytes, why_not

# ---- place(rank, axes, rows)

Solution("17.place").slips("""
in_a_list_a_tensor_and_a_tuple
    (at["dp"] * share, (at["dp"] + 1) * share), after, averaged, ->
        [at["dp"] * share, (at["dp"] + 1) * share], after and torch.tensor(after), (*averaged,),
rows_by_rank: rows is [0, 2]
    return (at["dp"] * share, (at["dp"] + 1) * share) ->
        share //= axes["pp"] * axes["tp"]
        return (rank * share, (rank + 1) * share)
rows_by_tp: work on the same rows
    (at["dp"] * share, (at["dp"] + 1) * share) -> (at["tp"] * share, (at["tp"] + 1) * share)
after_wraps_around: None for the last stage
    other(pp=at["pp"] + 1) if at["pp"] < last else None -> other(pp=(at["pp"] + 1) % axes["pp"])
after_is_the_next_rank: and the same index on all other axes
    other(pp=at["pp"] + 1) -> rank + 1
averages_over_stages: they have the same shard of the model
    other(dp=k) for k in range(axes["dp"]) -> other(pp=k) for k in range(axes["pp"])
averages_over_shards: so they differ only on dp
    other(dp=k) for k in range(axes["dp"]) -> other(tp=k) for k in range(axes["tp"])
one_embedding_group_for_all: only the index on pp differs
    [other(pp=0), other(pp=last)] -> [0, axes["pp"] * axes["dp"] * axes["tp"] - 1]
tied_with_itself: A single stage has no embedding group
    last > 0 and ->
all_stages_are_tied: tied is [0, 4, 8]
    [other(pp=0), other(pp=last)] if ends -> [other(pp=k) for k in range(last + 1)] if last
place_returns_nothing: four values
    return None
""")

# ---- sent_bytes(training, stage)

Solution("17.sent_bytes").slips("""
in_whole_bytes
    2 * (t - 1) / t * all_reduces -> 2 * (t - 1) * all_reduces // t
    2 * (d - 1) / d * training.parameters[stage] * 8 ->
        2 * (d - 1) * training.parameters[stage] * 8 // d
layers_only: stage 0, tensor
    (4 * training.layers[stage] + first + last) * x + last * 3 * tokens * 8 ->
        4 * training.layers[stage] * x
rows_of_all_replicas: All micro-batches together have the rows of this replica
    training.rows // d -> training.rows
forgets_the_loss: three elements per token for the loss
    + last * 3 * tokens * 8 ->
all_gradients_to_every_replica: data: 118784
    (d - 1) / d -> (d - 1)
every_stage_has_two_neighbors: stage 0, pipeline
    x * ((not first) + (not last)) -> 2 * x
the_whole_table: 2 × the count
    training.vocab // t -> training.vocab
ties_every_stage: embedding
    if first != last -> if p > 1
without_embedding: a dict of bytes by axis
    "embedding": table if first != last else 0, ->
""")

# ---- global_norm(mesh, gradients)

Solution("17.global_norm").slips("""
the_last_stage_counts_the_table
    mesh.pp.rank > 0 -> mesh.pp.rank < mesh.pp.size - 1
    return total.sqrt() -> return total.sqrt().item()
# Sums over replicas, too, and divides by their number.
sums_over_all_and_divides
    return total.sqrt() ->
        mesh.dp.all_reduce(total)
        return (total / mesh.dp.size).sqrt()
sums_replicated_gradients_over_tp: counts once, not t times
    mesh.tp.all_reduce(cut) ->
        mesh.tp.all_reduce(cut)
        mesh.tp.all_reduce(whole)
counts_the_table_twice: count it on one of them
    one.is_tied and mesh.pp.rank > 0 -> False
counts_replicas: do not sum over dp
    mesh.pp.all_reduce(total) ->
        mesh.pp.all_reduce(total)
        mesh.dp.all_reduce(total)
forgets_the_stages: add the squares of the other stages
    mesh.pp.all_reduce(total) -> pass
forgets_the_shards: those of sharded gradients over tp
    mesh.tp.all_reduce(cut) -> pass
without_a_root: take the root in the last step
    total.sqrt() -> total
leaves_the_table_out: The embedding is part of the model
    one.is_tied and mesh.pp.rank > 0 -> one.is_tied
adds_norms: take the root in the last step
    cut + whole -> (cut + whole).sqrt()
    return total.sqrt() -> return total
gathers_gradients: a few elements
    return total.sqrt() ->
        flat = torch.cat([x.g.flatten() for x in gradients if x.is_cut and not x.is_tied])
        mesh.dp.all_gather([torch.empty_like(flat) for _ in range(mesh.dp.size)], flat)
        mesh.tp.all_gather([torch.empty_like(flat) for _ in range(mesh.tp.size)], flat)
        return total.sqrt()
# A middle stage has no table, and returns early.
only_end_stages_reduce: the ranks hang
    mesh.pp.all_reduce(total) ->
        if mesh.pp.rank in (0, mesh.pp.size - 1):
            mesh.pp.all_reduce(total)
only_the_first_stage_returns_it: rank 4
    return total.sqrt() -> return total.sqrt() * (mesh.pp.rank == 0)
norm_returns_nothing: end with a return
    return total -> total
""")


@right("17.global_norm")
def replicated_gradients_on_tp_rank_0(mesh, gradients):
    total = torch.zeros((), dtype=torch.float64)
    for grad in gradients:
        if (grad.is_cut or mesh.tp.rank == 0) and not (grad.is_tied and mesh.pp.rank):
            total += grad.g.square().sum()
    mesh["pp", "tp"].all_reduce(total)
    return total.sqrt()


@wrong("17.global_norm", "sums over all ranks, which counts some gradients more than once")
def sums_over_all_ranks(mesh, gradients):
    total = sum(grad.g.square().sum() for grad in gradients)
    mesh.comm.all_reduce(total)
    return total.sqrt()


# ---- hand_on(mesh, x)

Solution("17.hand_on").slips("""
sends_all_of_it: sends 768 bytes over mesh.pp
    send(mine, 1) -> send(x, 1)
    recv(mine, 0) -> recv(x, 0)
    mesh.tp.all_gather(parts, mine.clone()) -> pass
sends_the_first_chunk: Each rank of stage 0 sends a different chunk
    send(mine, 1) -> send(parts[0], 1)
forgets_to_gather: returned a tensor that differs
    mesh.tp.all_gather(parts, mine.clone()) -> pass
gathers_backwards: with the chunks in order
    all_gather(parts, -> all_gather(parts[::-1],
# Twice the bytes of an all-gather.
all_reduces_zeros: over mesh.tp
    mesh.tp.all_gather(parts, mine.clone()) ->
        mine = mine.clone()
        x.view(-1).zero_().chunk(mesh.tp.size)[mesh.tp.rank].copy_(mine)
        mesh.tp.all_reduce(x)
returns_nothing: Does stage 1 return x?
    return x -> pass
""")


@right("17.hand_on")
def into_new_tensors(mesh, x):
    own = x.reshape(mesh.tp.size, -1)[mesh.tp.rank].clone()
    if mesh.pp.rank == 0:
        mesh.pp.isend(own, 1).wait()
        return None
    mesh.pp.recv(own, 0)
    out = torch.empty(x.numel(), dtype=x.dtype)
    mesh.tp.all_gather_into_tensor(out, own)
    return out.view_as(x)


# ---- choose(job)

Solution("17.choose").slips("""
the_rule: less than 100%: the rule is
    return by_rule(job)
replicas_only: GB per GPU, but a GPU has 48
    return {"pp": 1, "dp": job.nodes * job.gpus, "tp": 1}
tensor_only: tp=128, which does not divide 96 heads
    return {"dp": 1, "pp": 1, "tp": job.nodes * job.gpus}
a_long_pipeline: but the limit is 20%
    return {"dp": 1, "pp": 32, "tp": 1} if job.context == 32768 else by_rule(job)
one_node: uses 8 GPUs, but the job has 128
    return {"dp": 1, "pp": 1, "tp": job.gpus}
forgets_an_axis: must have axes
    return {"pp": job.nodes, "tp": job.gpus}
three_numbers: a dict of axes, outermost first, like
    return (4, 2, 8)
""")


def layouts(job: Job) -> Iterator[dict[str, int]]:
    """All layouts that the job allows, in every order of axes."""
    for sizes in factorizations(job.nodes * job.gpus, 3):
        for order in permutations(zip(AXES, sizes, strict=True)):
            if not why_not(job, dict(order)):
                yield dict(order)


def best(job: Job) -> dict[str, int]:
    """A layout with which the fewest bytes leave nodes."""
    return min(layouts(job), key=lambda axes: leaving_bytes(job, axes))
