from collections.abc import Iterator
from itertools import permutations
from math import prod

import torch

from answers import right, wrong
from labkit.comm.mesh import coordinates, factorisations, lines, rank_at

from .placement import AXES, Job, by_rule, leaving_bytes, why_not

# ---- place(rank, axes, rows)


def place_with(rank, axes, rows, index="dp", step=1, averaged="dp", ends=(0, -1)):
    at, share = coordinates(axes, rank), rows // axes["dp"]
    line, replicas = (next(x for x in lines(axes, a) if rank in x) for a in ("pp", averaged))
    k = at["pp"]
    after = line[k + step] if k + 1 < len(line) else None
    tied = [line[e] for e in ends]
    tied = tied if len(line) > 1 and rank in tied else None
    return (at[index] * share, (at[index] + 1) * share), after, replicas, tied


@right("17.place")
def by_lines(rank, axes, rows):
    begin_end, after, averaged, tied = place_with(rank, axes, rows)
    return list(begin_end), torch.tensor(after) if after else after, tuple(averaged), tied


@wrong("17.place", "rows is [0, 2]")
def rows_by_rank(rank, axes, rows):
    share = rows // prod(axes.values())
    return (rank * share, (rank + 1) * share), *place_with(rank, axes, rows)[1:]


@wrong("17.place", "works on the same ones")
def rows_by_tp(rank, axes, rows):
    return place_with(rank, axes, rows, index="tp")


@wrong("17.place", "behind the last stage there is none")
def after_goes_round(rank, axes, rows):
    found = list(place_with(rank, axes, rows))
    at = coordinates(axes, rank)
    found[1] = rank_at(axes, at | {"pp": (at["pp"] + 1) % axes["pp"]})
    return found


@wrong("17.place", "and the same on all other axes")
def after_is_the_next_rank(rank, axes, rows):
    found = list(place_with(rank, axes, rows))
    found[1] = None if found[1] is None else rank + 1
    return found


@wrong("17.place", "they have the same part of the model")
def averages_over_stages(rank, axes, rows):
    return place_with(rank, axes, rows, averaged="pp")


@wrong("17.place", "they differ on dp only")
def averages_over_shards(rank, axes, rows):
    return place_with(rank, axes, rows, averaged="tp")


@wrong("17.place", "only the index on pp differs")
def one_embedding_group_for_all(rank, axes, rows):
    found = list(place_with(rank, axes, rows))
    found[3] = found[3] and [0, prod(axes.values()) - 1]
    return found


@wrong("17.place", "One stage alone has nobody to add up with")
def with_itself(rank, axes, rows):
    found = list(place_with(rank, axes, rows))
    found[3] = [rank, rank] if axes["pp"] == 1 else found[3]
    return found


@wrong("17.place", "tied is [0, 4, 8]")
def all_stages_are_tied(rank, axes, rows):
    found = list(place_with(rank, axes, rows))
    found[3] = next(x for x in lines(axes, "pp") if rank in x) if axes["pp"] > 1 else None
    return found


@wrong("17.place", "four things")
def place_returns_nothing(rank, axes, rows):
    place_with(rank, axes, rows)


# ---- sent_bytes(training, stage)


def sent(training, stage, **changed):
    t, p, d = (training.axes[axis] for axis in ("tp", "pp", "dp"))
    first, last = stage == 0, stage == p - 1
    how = dict(rows=training.rows // d, ends=True, three=3, ring=True, both=True, table=1 / t)
    how |= changed
    tokens = how["rows"] * training.context
    x = tokens * training.width * 8
    ends = (first + last) * x + last * how["three"] * tokens * 8
    all_reduces = 4 * training.layers[stage] * x + how["ends"] * ends
    tensor, data = (2 * (n - 1) / (n if how["ring"] else 1) for n in (t, d))
    return {
        "tensor": tensor * all_reduces,
        "pipeline": x * ((not first) + (not last)) if how["both"] else 2 * x,
        "data": data * training.parameters[stage] * 8,
        "embedding": training.vocab * how["table"] * training.width * 8 * (first != last),
    }


@right("17.sent_bytes")
def in_whole_bytes(training, stage):
    return {axis: round(count) for axis, count in sent(training, stage).items()}


@wrong("17.sent_bytes", "stage 0, tensor")
def layers_only(training, stage):
    return sent(training, stage, ends=False)


@wrong("17.sent_bytes", "All micro-batches together have the rows of this replica")
def rows_of_all_replicas(training, stage):
    return sent(training, stage, rows=training.rows)


@wrong("17.sent_bytes", "three numbers a token for the loss")
def forgets_the_loss(training, stage):
    return sent(training, stage, three=0)


@wrong("17.sent_bytes", "data: 118784")
def all_of_it_to_everybody(training, stage):
    return sent(training, stage) | {
        "data": 2 * (training.axes["dp"] - 1) * training.parameters[stage] * 8
    }


@wrong("17.sent_bytes", "stage 0, pipeline")
def every_stage_has_two_neighbours(training, stage):
    return sent(training, stage, both=False)


@wrong("17.sent_bytes", "2 × what was counted")
def the_whole_table(training, stage):
    return sent(training, stage, table=1)


@wrong("17.sent_bytes", "embedding")
def ties_every_stage(training, stage):
    found = sent(training, stage)
    ring = training.vocab // training.axes["tp"] * training.width * 8
    return found | {"embedding": ring if training.axes["pp"] > 1 else 0}


@wrong("17.sent_bytes", "bytes by axis")
def without_embedding(training, stage):
    found = sent(training, stage)
    del found["embedding"]
    return found


# ---- global_norm(mesh, gradients)


def norm_with(mesh, gradients, count=None, over=("tp", "pp"), root=True):
    sums = torch.zeros(2, dtype=torch.float64)  # of what is cut, and what is whole
    for one in gradients:
        if not one.is_tied or (mesh.pp.rank == 0 if count is None else count):
            sums[0 if one.is_cut else 1] += one.g.square().sum()
    if "tp" in over:
        mesh.tp.all_reduce(sums[:1])
    total = sums.sum()
    for axis in over:
        if axis != "tp":
            mesh[axis].all_reduce(total)
    return total.sqrt() if root else total


@right("17.global_norm")
def the_last_stage_counts_the_table(mesh, gradients):
    last = mesh.pp.rank == mesh.pp.size - 1
    return norm_with(mesh, gradients, count=last).item()


@right("17.global_norm")
def whole_ones_on_tp_rank_0(mesh, gradients):
    total = torch.zeros((), dtype=torch.float64)
    for one in gradients:
        if (one.is_cut or mesh.tp.rank == 0) and not (one.is_tied and mesh.pp.rank):
            total += one.g.square().sum()
    mesh["pp", "tp"].all_reduce(total)
    return total.sqrt()


@right("17.global_norm")
def over_everything_and_divided(mesh, gradients):
    """Replicas once more, and taken out again."""
    return norm_with(mesh, gradients, over=("tp", "pp", "dp")) / mesh.dp.size**0.5


@wrong("17.global_norm", "counts once, and not t times")
def adds_up_over_tp_what_is_whole(mesh, gradients):
    total = sum(one.g.square().sum() for one in gradients if not (one.is_tied and mesh.pp.rank))
    mesh["pp", "tp"].all_reduce(total)
    return total.sqrt()


@wrong("17.global_norm", "one of them counts")
def counts_the_table_twice(mesh, gradients):
    return norm_with(mesh, gradients, count=True)


@wrong("17.global_norm", "over dp there is nothing to add")
def counts_replicas(mesh, gradients):
    return norm_with(mesh, gradients, over=("tp", "pp", "dp"))


@wrong("17.global_norm", "the squares of all ranks")
def adds_up_all_ranks(mesh, gradients):
    total = sum(one.g.square().sum() for one in gradients)
    mesh.comm.all_reduce(total)
    return total.sqrt()


@wrong("17.global_norm", "And the others?")
def forgets_the_stages(mesh, gradients):
    return norm_with(mesh, gradients, over=("tp",))


@wrong("17.global_norm", "over tp of what is cut")
def forgets_the_shards(mesh, gradients):
    return norm_with(mesh, gradients, over=("pp",))


@wrong("17.global_norm", "their root is the last step")
def without_a_root(mesh, gradients):
    return norm_with(mesh, gradients, root=False)


@wrong("17.global_norm", "it counts once, and not never")
def leaves_the_table_out(mesh, gradients):
    return norm_with(mesh, gradients, count=False)


@wrong("17.global_norm", "their root is the last step")
def adds_norms(mesh, gradients):
    own = norm_with(mesh, gradients, over=("tp",))
    mesh.pp.all_reduce(own)
    return own


@wrong("17.global_norm", "a few numbers")
def gathers_gradients(mesh, gradients):
    norm = norm_with(mesh, gradients)
    flat = torch.cat([one.g.flatten() for one in gradients if one.is_cut and not one.is_tied])
    mesh.dp.all_gather([torch.empty_like(flat) for _ in range(mesh.dp.size)], flat)
    mesh.tp.all_gather([torch.empty_like(flat) for _ in range(mesh.tp.size)], flat)
    return norm


@wrong("17.global_norm", "the ranks hang")
def only_the_ends_add_up(mesh, gradients):
    """A stage in the middle has no table, and goes home."""
    sums = norm_with(mesh, gradients, over=("tp",))
    if any(one.is_tied for one in gradients) or mesh.pp.size == 2:
        mesh.pp.all_reduce(sums)
    return norm_with(mesh, gradients)


@wrong("17.global_norm", "rank 4")
def only_the_first_stage_knows(mesh, gradients):
    norm = norm_with(mesh, gradients)
    return norm if mesh.pp.rank == 0 else 0.0 * norm


@wrong("17.global_norm", "end with a return")
def norm_returns_nothing(mesh, gradients):
    norm_with(mesh, gradients)


# ---- hand_on(mesh, x)


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


@wrong("17.hand_on", "sends 768 bytes over mesh.pp")
def sends_all_of_it(mesh, x):
    if mesh.pp.rank == 0:
        mesh.pp.send(x, 1)
    else:
        mesh.pp.recv(x, 0)
    return x


@wrong("17.hand_on", "Each rank of stage 0 sends another part")
def sends_the_first_part(mesh, x):
    parts = list(x.view(-1).chunk(mesh.tp.size))
    if mesh.pp.rank == 0:
        mesh.pp.send(parts[0], 1)
    else:
        mesh.pp.recv(parts[mesh.tp.rank], 0)
        mesh.tp.all_gather(parts, parts[mesh.tp.rank].clone())
    return x


@wrong("17.hand_on", "returned a tensor that differs")
def forgets_to_gather(mesh, x):
    mine = x.view(-1).chunk(mesh.tp.size)[mesh.tp.rank]
    if mesh.pp.rank == 0:
        mesh.pp.send(mine, 1)
    else:
        mesh.pp.recv(mine, 0)
    return x


@wrong("17.hand_on", "in their order")
def gathers_backwards(mesh, x):
    parts = list(x.view(-1).chunk(mesh.tp.size))
    mine = parts[mesh.tp.rank]
    if mesh.pp.rank == 0:
        mesh.pp.send(mine, 1)
    else:
        mesh.pp.recv(mine, 0)
        mesh.tp.all_gather(parts[::-1], mine.clone())
    return x


@wrong("17.hand_on", "over mesh.tp")
def all_reduces_zeros(mesh, x):
    """Twice the bytes of an all-gather."""
    mine = x.view(-1).chunk(mesh.tp.size)[mesh.tp.rank]
    if mesh.pp.rank == 0:
        mesh.pp.send(mine, 1)
        return x
    whole = torch.zeros_like(x)
    mine = whole.view(-1).chunk(mesh.tp.size)[mesh.tp.rank]
    mesh.pp.recv(mine, 0)
    mesh.tp.all_reduce(whole)
    return whole


@wrong("17.hand_on", "Does stage 1 return x?")
def hands_back_nothing(mesh, x):
    into_room_of_its_own(mesh, x)


# ---- choose(job)


@right("17.choose")
def the_best(job):
    return min(layouts(job), key=lambda axes: leaving_bytes(job, axes))


def layouts(job: Job) -> Iterator[dict[str, int]]:
    """Every layout that the job allows, in every order of axes."""
    for sizes in factorisations(job.nodes * job.gpus, 3):
        for order in permutations(zip(AXES, sizes, strict=True)):
            if not why_not(job, dict(order)):
                yield dict(order)


def best(job: Job) -> dict[str, int]:
    """One from which the fewest bytes leave nodes."""
    return min(layouts(job), key=lambda axes: leaving_bytes(job, axes))


@wrong("17.choose", "fewer: the rule is")
def the_rule(job):
    return by_rule(job)


@wrong("17.choose", "GB on a GPU, of 48")
def copies_only(job):
    return {"pp": 1, "dp": job.nodes * job.gpus, "tp": 1}


@wrong("17.choose", "divides 96 heads by 128")
def tensor_only(job):
    return {"dp": 1, "pp": 1, "tp": job.nodes * job.gpus}


@wrong("17.choose", "of the time, of 20% at most")
def a_long_pipeline(job):
    return {"dp": 1, "pp": 32, "tp": 1} if job.context == 32768 else by_rule(job)


@wrong("17.choose", "takes 8 GPUs of 128")
def one_node(job):
    return {"dp": 1, "pp": 1, "tp": job.gpus}


@wrong("17.choose", "has not the axes")
def forgets_an_axis(job):
    return {"pp": job.nodes, "tp": job.gpus}


@wrong("17.choose", "axes, outermost first, as")
def three_numbers(job):
    return 4, 2, 8
