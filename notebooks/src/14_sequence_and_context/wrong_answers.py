import torch

from answers import right, wrong

from .hybrid import choices, exposed_us

# ---- GatherSequence: forward(ctx, comm, x), backward(ctx, dy)


class Right(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comm, x):
        ctx.comm = comm
        parts = list(x.new_empty(comm.size, *x.shape))
        comm.all_gather(parts, x)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, dy):
        parts = [part.contiguous() for part in dy.tensor_split(ctx.comm.size, 1)]
        dx = torch.empty_like(parts[0])
        ctx.comm.reduce_scatter(dx, parts)
        return None, dx


right("14.GatherSequence")(Right)


@wrong("14.GatherSequence", "Whose gradients belong to your part?")
class TakesItsOwnPart(Right):
    @staticmethod
    def backward(ctx, dy):
        return None, dy.chunk(ctx.comm.size, 1)[ctx.comm.rank]


@wrong("14.GatherSequence", "How much of that does a rank need?")
class AllReduces(Right):
    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous().clone()
        ctx.comm.all_reduce(dy)
        return None, dy.chunk(ctx.comm.size, 1)[ctx.comm.rank]


@wrong("14.GatherSequence", "the mean over the ranks")
class TakesTheMean(Right):
    @staticmethod
    def backward(ctx, dy):
        _, dx = Right.backward(ctx, dy)
        return None, dx / ctx.comm.size


@wrong("14.GatherSequence", "has no gradient of x")
class SendsNothingBack(Right):
    @staticmethod
    def backward(ctx, dy):
        return None, None


@wrong("14.GatherSequence", "bytes in forward, with ['all_reduce']")
class AddsUpWhatOthersLackAndHave(Right):
    @staticmethod
    def forward(ctx, comm, x):
        ctx.comm = comm
        whole = torch.cat([x if r == comm.rank else 0 * x for r in range(comm.size)], 1)
        comm.all_reduce(whole)
        return whole


@wrong("14.GatherSequence", "along the sequence, dim 1")
class BesideTheRows(Right):
    @staticmethod
    def forward(ctx, comm, x):
        return Right.forward(ctx, comm, x).view(-1, *x.shape[1:])


# ---- merge(out, L, more_out, more_L)


@right("14.merge")
def by_the_larger(out, L, more_out, more_L):
    top = torch.maximum(L, more_L)
    a, b = (L - top).exp(), (more_L - top).exp()
    return (out * a[..., None] + more_out * b[..., None]) / (a + b)[..., None], top + (a + b).log()


@wrong("14.merge", "with large scores, L is not finite")
def without_care(out, L, more_out, more_L):
    a, b = L.exp(), more_L.exp()
    return (out * a[..., None] + more_out * b[..., None]) / (a + b)[..., None], (a + b).log()


@wrong("14.merge", "give it the weight of that sum")
def half_and_half(out, L, more_out, more_L):
    return (out + more_out) / 2, torch.logaddexp(L, more_L)


@wrong("14.merge", "give it the weight of that sum")
def just_added(out, L, more_out, more_L):
    return out + more_out, torch.logaddexp(L, more_L)


@wrong("14.merge", "the log of the sum of both parts")
def logs_added(out, L, more_out, more_L):
    return by_the_larger(out, L, more_out, more_L)[0], L + more_L


@wrong("14.merge", "out and L, a pair")
def out_only(out, L, more_out, more_L):
    return by_the_larger(out, L, more_out, more_L)[0]


# ---- own_positions(length, ranks, rank)


@right("14.own_positions")
def as_tensors(length, ranks, rank):
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


@wrong("14.own_positions", "an early one and a late one")
def contiguous(length, ranks, rank):
    return list(range(rank * length // ranks, (rank + 1) * length // ranks))


@wrong("14.own_positions", "an early one and a late one")
def every_nth(length, ranks, rank):
    return list(range(rank, length, ranks))


@wrong("14.own_positions", "each position once")
def the_late_chunk_twice(length, ranks, rank):
    c = length // (2 * ranks)
    late = length - (rank + 1) * c
    return [*range(late, late + c), *range(late, late + c)]


@wrong("14.own_positions", "the early one first")
def late_first(length, ranks, rank):
    c = length // (2 * ranks)
    late = length - (rank + 1) * c
    return [*range(late, late + c), *range(rank * c, rank * c + c)]


@wrong("14.own_positions", "a list of positions")
def chunks_by_name(length, ranks, rank):
    return f"{rank} and {2 * ranks - 1 - rank}"


# ---- choose(job)


@right("14.choose")
def the_least(job):
    return min(choices(job), key=lambda u: exposed_us(job, u))


@wrong("14.choose", "less than the")
def only_rings(job):
    return 1


@wrong("14.choose", "less than the")
def as_many_as_go(job):
    return choices(job)[-1]


@wrong("14.choose", "u = 2 or the largest below")
def always_two(job):
    return 2


@wrong("14.choose", "which divide the ranks")
def all_ranks(job):
    return job.ranks


@wrong("14.choose", "choose returned 'ring'")
def by_name(job):
    return "ring"
