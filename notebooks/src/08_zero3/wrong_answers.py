import torch

from answers import right, wrong
from labkit.parallel.common.flat import FlatPartition

# ---- gather_unit(comm, share, shapes)


def whole(comm, share):
    full = share.new_empty(comm.size * share.numel())
    comm.all_gather_into_tensor(full, share)
    return full


def cut(full, shapes):
    found, start = [], 0
    for shape in shapes:
        found.append(full[start : start + shape.numel()].view(shape))
        start += shape.numel()
    return found


@wrong("08.gather_unit", "holds 608 bytes at once")
def copies_every_tensor(comm, share, shapes):
    return [x.clone() for x in cut(whole(comm, share), shapes)]


@wrong("08.gather_unit", "calls 4 all_gathers")
def one_gather_for_each_tensor(comm, share, shapes):
    for _ in shapes:
        full = whole(comm, share)
    return cut(full, shapes)


@wrong("08.gather_unit", "calls all_reduce")
def sums_zeros(comm, share, shapes):
    full = share.new_zeros(comm.size * share.numel())
    full[comm.rank * share.numel() :][: share.numel()] = share
    comm.all_reduce(full)
    return cut(full, shapes)


@wrong("08.gather_unit", "rank 1 returned")
def each_rank_begins_with_its_own(comm, share, shapes):
    return cut(whole(comm, share).roll(-comm.rank * share.numel()), shapes)


@wrong("08.gather_unit", "Where is the padding?")
def takes_them_from_the_end(comm, share, shapes):
    full = whole(comm, share)
    return cut(full.flip(0), shapes)


@wrong("08.gather_unit", "a list of 4 tensors")
def leaves_it_flat(comm, share, shapes):
    return whole(comm, share)


@right("08.gather_unit")
def with_the_flat_partition(comm, share, shapes):
    return FlatPartition(shapes, comm.size).views(whole(comm, share))


# ---- GatheredLinear


class Whole(torch.autograd.Function):
    """What all have in common; a wrong one changes one thing."""

    @staticmethod
    def forward(ctx, x, share, comm, shape):
        ctx.save_for_backward(x, share)
        ctx.comm, ctx.shape = comm, shape
        return x @ cut(whole(comm, share), [shape])[0].T

    @staticmethod
    def weight(ctx):
        return cut(whole(ctx.comm, ctx.saved_tensors[1]), [ctx.shape])[0]

    @staticmethod
    def reduced(ctx, dw):
        share = ctx.saved_tensors[1]
        flat = share.new_zeros(share.numel() * ctx.comm.size)
        flat[: dw.numel()] = dw.reshape(-1)
        mine = torch.empty_like(share)
        ctx.comm.reduce_scatter_tensor(mine, flat / ctx.comm.size)
        return mine


def backward(ctx, dy, weight=Whole.weight, reduced=Whole.reduced):
    x = ctx.saved_tensors[0]
    return dy @ weight(ctx), reduced(ctx, dy.T @ x), None, None


@right("08.GatheredLinear")
class PaddedCopies(Whole):
    @staticmethod
    def backward(ctx, dy):
        x, share = ctx.saved_tensors
        dx = dy @ Whole.weight(ctx)
        dw = dy.T @ x
        flat = torch.zeros(ctx.comm.size * share.numel())
        flat[: dw.numel()] = dw.flatten()
        flat = flat / ctx.comm.size
        mine = torch.empty_like(share)
        ctx.comm.reduce_scatter_tensor(mine, flat)
        return dx, mine, None, None


@wrong("08.GatheredLinear", "more at its peak than are needed")
class MakesRoomForAll(Whole):
    @staticmethod
    def backward(ctx, dy):
        room = torch.zeros(3000)
        return *backward(ctx, dy)[:2], *[None] * (len(room) - 2998)


@wrong("08.GatheredLinear", "too much between forward and backward: the weights of all layers")
class KeepsTheWeight(Whole):
    @staticmethod
    def forward(ctx, x, share, comm, shape):
        weight = cut(whole(comm, share), [shape])[0]
        ctx.save_for_backward(x, share, weight)
        ctx.comm, ctx.shape = comm, shape
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        return backward(ctx, dy, weight=lambda ctx: ctx.saved_tensors[2])


@wrong("08.GatheredLinear", "too much between forward and backward")
class KeepsItOnTheSide(Whole):
    @staticmethod
    def forward(ctx, x, share, comm, shape):
        y = Whole.forward(ctx, x, share, comm, shape)
        ctx.full = whole(comm, share)
        return y

    @staticmethod
    def backward(ctx, dy):
        return backward(ctx, dy)


@wrong("08.GatheredLinear", "layer 0's share is 2 × the right one")
class ForgetsToDivide(Whole):
    @staticmethod
    def backward(ctx, dy):
        def reduced(ctx, dw):
            return Whole.reduced(ctx, dw * ctx.comm.size)

        return backward(ctx, dy, reduced=reduced)


@wrong("08.GatheredLinear", "is not that of all ranks' rows")
class ReducesNothing(Whole):
    @staticmethod
    def backward(ctx, dy):
        def reduced(ctx, dw):
            share = ctx.saved_tensors[1]
            flat = share.new_zeros(share.numel() * ctx.comm.size)
            flat[: dw.numel()] = dw.reshape(-1)
            return flat[ctx.comm.rank * share.numel() :][: share.numel()].clone()

        return backward(ctx, dy, reduced=reduced)


@wrong("08.GatheredLinear", "calls all_reduce")
class ReducesToAll(Whole):
    @staticmethod
    def backward(ctx, dy):
        def reduced(ctx, dw):
            share = ctx.saved_tensors[1]
            flat = share.new_zeros(share.numel() * ctx.comm.size)
            flat[: dw.numel()] = dw.reshape(-1) / ctx.comm.size
            ctx.comm.all_reduce(flat)
            return flat[ctx.comm.rank * share.numel() :][: share.numel()].clone()

        return backward(ctx, dy, reduced=reduced)


@wrong("08.GatheredLinear", "bytes, 1.33 × what is needed")
class GathersTwiceInBackward(Whole):
    @staticmethod
    def backward(ctx, dy):
        Whole.weight(ctx)
        return backward(ctx, dy)


@wrong("08.GatheredLinear", "the gradient of x is not right")
class StopsAtTheFirstLayer(Whole):
    @staticmethod
    def backward(ctx, dy):
        dx, *others = backward(ctx, dy)
        return dx * (2 if dx.shape[1] == 12 else 1), *others


# ---- forward_with_prefetch(comm, shares, layer, x, ahead)


def start(comm, share):
    full = share.new_empty(comm.size * share.numel())
    return full, comm.all_gather_into_tensor(full, share, async_op=True)


@wrong("08.forward_with_prefetch", "with ahead=1, rank 0: when unit 0 computes, 1 of 2 gathers")
def each_when_it_is_needed(comm, shares, layer, x, ahead):
    for i, share in enumerate(shares):
        full, handle = start(comm, share)
        handle.wait()
        x = layer(i, full, x)
        del full, handle
    return x


@wrong("08.forward_with_prefetch", "6 gathers are asked for")
def everything_at_once(comm, shares, layer, x, ahead):
    gathers = [start(comm, share) for share in shares]
    for i in range(len(shares)):
        full, handle = gathers.pop(0)
        handle.wait()
        x = layer(i, full, x)
    return x


def in_order(comm, shares, layer, x, ahead, wait=True, keep=False, early=False):
    gathers, kept = {}, []
    for i in range(len(shares)):
        for j in range(i, min(i + ahead, len(shares) - 1) + 1):
            if j not in gathers and (j >= i):
                gathers[j] = start(comm, shares[j])
                if early:
                    gathers[j][1].wait()
        full, handle = gathers[i]
        handle.wait()
        if keep:
            kept.append(full)
        x = layer(i, full, x)
        gathers[i] = full = handle = None
    return x


@wrong("08.forward_with_prefetch", "still holds memory")
def keeps_what_has_computed(comm, shares, layer, x, ahead):
    return in_order(comm, shares, layer, x, ahead, keep=True)


@wrong("08.forward_with_prefetch", "has waited for 2 gathers")
def waits_at_once(comm, shares, layer, x, ahead):
    return in_order(comm, shares, layer, x, ahead, early=True)


@wrong("08.forward_with_prefetch", "has waited for 2 gathers")
def blocks(comm, shares, layer, x, ahead):
    fulls = {}
    for i in range(len(shares)):
        for j in range(i, min(i + ahead, len(shares) - 1) + 1):
            if j not in fulls:
                fulls[j] = shares[j].new_empty(comm.size * shares[j].numel())
                comm.all_gather_into_tensor(fulls[j], shares[j])
        x = layer(i, fulls[i], x)
        fulls[i] = None
    return x


@wrong("08.forward_with_prefetch", "computes units [5, 4, 3, 2, 1, 0]")
def the_last_unit_first(comm, shares, layer, x, ahead):
    def other(i, full, x):
        return layer(len(shares) - 1 - i, full, x)

    return in_order(comm, shares[::-1], other, x, ahead)


@right("08.forward_with_prefetch")
def the_first_one_blocks(comm, shares, layer, x, ahead):
    return in_order(comm, shares, layer, x, ahead)


# ---- choose_units(layers, wire, limit_bytes)


@wrong("08.choose_units", "no less than with a unit for each layer")
def a_unit_for_each_layer(layers, wire, limit_bytes):
    return [1] * len(layers), 1


@wrong("08.choose_units", "MB at once")
def one_unit(layers, wire, limit_bytes):
    return [len(layers)], 0


@wrong("08.choose_units", "does not cut 34 layers into units")
def loses_layers(layers, wire, limit_bytes):
    return [3] * (len(layers) // 3), 1


@wrong("08.choose_units", "expected: (counts, prefetch)")
def forgets_the_prefetch(layers, wire, limit_bytes):
    return [1] * len(layers)


@wrong("08.choose_units", "prefetch is -1")
def looks_back(layers, wire, limit_bytes):
    return [1] * len(layers), -1


@right("08.choose_units")
def by_the_latency(layers, wire, limit_bytes):
    if wire.latency_s < 1e-4:
        return [1] * len(layers), 3
    return [1, *[3] * 10, 2, 1], 1
