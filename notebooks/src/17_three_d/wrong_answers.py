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
rows_by_tp: works on the same ones
    (at["dp"] * share, (at["dp"] + 1) * share) -> (at["tp"] * share, (at["tp"] + 1) * share)
after_goes_round: behind the last stage there is none
    other(pp=at["pp"] + 1) if at["pp"] < last else None -> other(pp=(at["pp"] + 1) % axes["pp"])
after_is_the_next_rank: and the same on all other axes
    other(pp=at["pp"] + 1) -> rank + 1
averages_over_stages: they have the same part of the model
    other(dp=k) for k in range(axes["dp"]) -> other(pp=k) for k in range(axes["pp"])
averages_over_shards: they differ on dp only
    other(dp=k) for k in range(axes["dp"]) -> other(tp=k) for k in range(axes["tp"])
one_embedding_group_for_all: only the index on pp differs
    [other(pp=0), other(pp=last)] -> [0, axes["pp"] * axes["dp"] * axes["tp"] - 1]
with_itself: One stage alone has nobody to add up with
    last > 0 and ->
all_stages_are_tied: tied is [0, 4, 8]
    [other(pp=0), other(pp=last)] if ends -> [other(pp=k) for k in range(last + 1)] if last
place_returns_nothing: four things
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
forgets_the_loss: three numbers a token for the loss
    + last * 3 * tokens * 8 ->
all_of_it_to_everybody: data: 118784
    (d - 1) / d -> (d - 1)
every_stage_has_two_neighbours: stage 0, pipeline
    x * ((not first) + (not last)) -> 2 * x
the_whole_table: 2 × what was counted
    training.vocab // t -> training.vocab
ties_every_stage: embedding
    if first != last -> if p > 1
without_embedding: bytes by axis
    "embedding": table if first != last else 0, ->
""")

# ---- global_norm(mesh, gradients)

Solution("17.global_norm").slips("""
the_last_stage_counts_the_table
    mesh.pp.rank > 0 -> mesh.pp.rank < mesh.pp.size - 1
    return total.sqrt() -> return total.sqrt().item()
# Replicas once more, and taken out again.
over_everything_and_divided
    return total.sqrt() ->
        mesh.dp.all_reduce(total)
        return (total / mesh.dp.size).sqrt()
adds_up_over_tp_what_is_whole: counts once, and not t times
    mesh.tp.all_reduce(cut) ->
        mesh.tp.all_reduce(cut)
        mesh.tp.all_reduce(whole)
counts_the_table_twice: one of them counts
    one.is_tied and mesh.pp.rank > 0 -> False
counts_replicas: over dp there is nothing to add
    mesh.pp.all_reduce(total) ->
        mesh.pp.all_reduce(total)
        mesh.dp.all_reduce(total)
forgets_the_stages: And the others?
    mesh.pp.all_reduce(total) -> pass
forgets_the_shards: over tp of what is cut
    mesh.tp.all_reduce(cut) -> pass
without_a_root: their root is the last step
    total.sqrt() -> total
leaves_the_table_out: it counts once, and not never
    one.is_tied and mesh.pp.rank > 0 -> one.is_tied
adds_norms: their root is the last step
    cut + whole -> (cut + whole).sqrt()
    return total.sqrt() -> return total
gathers_gradients: a few numbers
    return total.sqrt() ->
        flat = torch.cat([one.g.flatten() for one in gradients if one.is_cut and not one.is_tied])
        mesh.dp.all_gather([torch.empty_like(flat) for _ in range(mesh.dp.size)], flat)
        mesh.tp.all_gather([torch.empty_like(flat) for _ in range(mesh.tp.size)], flat)
        return total.sqrt()
# A stage in the middle has no table, and goes home.
only_the_ends_add_up: the ranks hang
    mesh.pp.all_reduce(total) ->
        if mesh.pp.rank in (0, mesh.pp.size - 1):
            mesh.pp.all_reduce(total)
only_the_first_stage_knows: rank 4
    return total.sqrt() -> return total.sqrt() * (mesh.pp.rank == 0)
norm_returns_nothing: end with a return
    return total -> total
""")


@right("17.global_norm")
def whole_ones_on_tp_rank_0(mesh, gradients):
    total = torch.zeros((), dtype=torch.float64)
    for one in gradients:
        if (one.is_cut or mesh.tp.rank == 0) and not (one.is_tied and mesh.pp.rank):
            total += one.g.square().sum()
    mesh["pp", "tp"].all_reduce(total)
    return total.sqrt()


@wrong("17.global_norm", "the squares of all ranks")
def adds_up_all_ranks(mesh, gradients):
    total = sum(one.g.square().sum() for one in gradients)
    mesh.comm.all_reduce(total)
    return total.sqrt()


# ---- hand_on(mesh, x)

Solution("17.hand_on").slips("""
sends_all_of_it: sends 768 bytes over mesh.pp
    send(mine, 1) -> send(x, 1)
    recv(mine, 0) -> recv(x, 0)
    mesh.tp.all_gather(parts, mine.clone()) -> pass
sends_the_first_part: Each rank of stage 0 sends another part
    send(mine, 1) -> send(parts[0], 1)
forgets_to_gather: returned a tensor that differs
    mesh.tp.all_gather(parts, mine.clone()) -> pass
gathers_backwards: in their order
    all_gather(parts, -> all_gather(parts[::-1],
# Twice the bytes of an all-gather.
all_reduces_zeros: over mesh.tp
    mesh.tp.all_gather(parts, mine.clone()) ->
        mine = mine.clone()
        x.view(-1).zero_().chunk(mesh.tp.size)[mesh.tp.rank].copy_(mine)
        mesh.tp.all_reduce(x)
hands_back_nothing: Does stage 1 return x?
    return x -> pass
""")


@right("17.hand_on")
def into_room_of_its_own(mesh, x):
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
the_rule: fewer: the rule is
    return by_rule(job)
copies_only: GB on a GPU, of 48
    return {"pp": 1, "dp": job.nodes * job.gpus, "tp": 1}
tensor_only: divides 96 heads by 128
    return {"dp": 1, "pp": 1, "tp": job.nodes * job.gpus}
a_long_pipeline: of the time, of 20% at most
    return {"dp": 1, "pp": 32, "tp": 1} if job.context == 32768 else by_rule(job)
one_node: takes 8 GPUs of 128
    return {"dp": 1, "pp": 1, "tp": job.gpus}
forgets_an_axis: has not the axes
    return {"pp": job.nodes, "tp": job.gpus}
three_numbers: axes, outermost first, as
    return (4, 2, 8)
""")


def layouts(job: Job) -> Iterator[dict[str, int]]:
    """Every layout that the job allows, in every order of axes."""
    for sizes in factorizations(job.nodes * job.gpus, 3):
        for order in permutations(zip(AXES, sizes, strict=True)):
            if not why_not(job, dict(order)):
                yield dict(order)


def best(job: Job) -> dict[str, int]:
    """One from which the fewest bytes leave nodes."""
    return min(layouts(job), key=lambda axes: leaving_bytes(job, axes))
