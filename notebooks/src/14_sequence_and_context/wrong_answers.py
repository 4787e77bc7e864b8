import torch

from answers import Solution, right

from .hybrid import choices, exposed_us

# ---- GatherSequence: forward(ctx, comm, x), backward(ctx, dy)

Solution("14.GatherSequence").slips("""
into_one_tensor
    [torch.empty_like(x) for _ in range(comm.size)] -> list(x.new_empty(comm.size, *x.shape))
    dy.chunk(ctx.comm.size, dim=1) -> dy.tensor_split(ctx.comm.size, 1)
SlicesItsOwnGradient: combine into the gradient of this rank's shard
    ctx.comm.reduce_scatter(dx, parts) -> dx = parts[ctx.comm.rank]
AllReduces: Which part does a rank need?
    ctx.comm.reduce_scatter(dx, parts) ->
        dy = dy.contiguous().clone()
        ctx.comm.all_reduce(dy)
        dx = dy.chunk(ctx.comm.size, 1)[ctx.comm.rank]
TakesTheMean: the mean over the ranks
    return None, dx -> return None, dx / ctx.comm.size
ReturnsNoGradient: has no gradient of x
    ctx.comm.reduce_scatter(dx, parts) -> dx = None
AllReducesPaddedShards: bytes in forward, with ['all_reduce']
    comm.all_gather(parts, x)
    return torch.cat(parts, dim=1) ->
        whole = torch.cat([x if r == comm.rank else 0 * x for r in range(comm.size)], 1)
        comm.all_reduce(whole)
        return whole
ConcatenatesRows: along the sequence, dim 1
    torch.cat(parts, dim=1) -> torch.cat(parts, dim=0)
""")

# ---- merge(out, L, more_out, more_L)

Solution("14.merge").slips("""
without_care: with large scores, L is not finite
    torch.logaddexp(L, more_L) -> (L.exp() + more_L.exp()).log()
mean_of_both: weight it with exp(L - L')
    return ((out + more_out) / 2, torch.logaddexp(L, more_L))
sum_of_both: weight it with exp(L - L')
    return (out + more_out, torch.logaddexp(L, more_L))
logs_added: the log of the sum of exp(score) over both
    new[..., None], both -> new[..., None], L + more_L
out_only: a pair (out, L)
    new[..., None], both -> new[..., None]
""")


@right("14.merge")
def by_the_larger(out, L, more_out, more_L):
    top = torch.maximum(L, more_L)
    a, b = (L - top).exp(), (more_L - top).exp()
    return (out * a[..., None] + more_out * b[..., None]) / (a + b)[..., None], top + (a + b).log()


# ---- own_positions(length, ranks, rank)

Solution("14.own_positions").slips("""
contiguous: one early and one late chunk
    return list(range(rank * length // ranks, (rank + 1) * length // ranks))
every_nth: one early and one late chunk
    return list(range(rank, length, ranks))
the_late_chunk_twice: each position once
    early, early + chunk -> late, late + chunk
late_first: the early chunk first
    early, late = -> late, early =
chunks_by_name: a list of positions
    return f"{rank} and {2 * ranks - 1 - rank}"
""")


@right("14.own_positions")
def as_tensors(length, ranks, rank):
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


# ---- choose(job)

Solution("14.choose").slips("""
only_rings: rings only, and less than
    return 1
largest_u: rings only, and less than
    min(fits, key=exposed_s) -> fits[-1]
always_two: u = 2 or the largest valid u below
    return 2
all_ranks: which divide the numbers of ranks
    return job.ranks
by_name: choose returned 'ring'
    return "ring"
""")


@right("14.choose")
def least_exposed(job):
    return min(choices(job), key=lambda u: exposed_us(job, u))
