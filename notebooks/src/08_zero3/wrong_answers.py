from answers import Solution, right
from labkit.parallel.common.flat import FlatPartition

# ---- gather_unit(comm, share, shapes)

Solution("08.gather_unit").slips("""
copies_every_tensor: holds 608 bytes at its peak
    .view(shape) -> .view(shape).clone()
one_gather_for_each_tensor: calls 4 all_gathers
    comm.all_gather_into_tensor(full, share) ->
        for _ in shapes:
            comm.all_gather_into_tensor(full, share)
sums_zeros: calls all_reduce
    share.new_empty( -> share.new_zeros(
    comm.all_gather_into_tensor(full, share) ->
        full.chunk(comm.size)[comm.rank].copy_(share)
        comm.all_reduce(full)
each_rank_starts_with_its_share: rank 1 returned
    tensors, start = [], 0 -> tensors, start, full = [], 0, full.roll(-comm.rank * share.numel())
reads_from_the_end: where is the padding?
    tensors, start = [], 0 -> tensors, start, full = [], 0, full.flip(0)
leaves_it_flat: a list of 4 tensors
    return tensors -> return full
""")


@right("08.gather_unit")
def with_the_flat_partition(comm, share, shapes):
    full = share.new_empty(comm.size * share.numel())
    comm.all_gather_into_tensor(full, share)
    return FlatPartition(shapes, comm.size).views(full)


# ---- GatheredLinear: forward(ctx, x, share, comm, shape), backward(ctx, dy)

Solution("08.GatheredLinear").slips("""
PaddedCopies
    torch.mm(dy.T, x, out=flat[: weight.numel()].view(ctx.shape)) ->
        flat[: weight.numel()] = (dy.T @ x).flatten()
    flat.div_(ctx.comm.size) -> flat / ctx.comm.size
AllocatesTooMuch: bytes more than necessary at its peak
    x, share = ctx.saved_tensors ->
        x, share = ctx.saved_tensors
        room = torch.zeros(3000)
KeepsTheWeight: too many between forward and backward: the whole weights of all layers
    ctx.save_for_backward(x, share) -> pass
    return x @ weight.T ->
        ctx.save_for_backward(x, share, weight)
        return x @ weight.T
    x, share = ctx.saved_tensors -> x, share, weight = ctx.saved_tensors
    (weight,) = gather_unit(ctx.comm, share, [ctx.shape]) -> pass
KeepsItInCtx: too many between forward and backward
    return x @ weight.T ->
        ctx.full = weight
        return x @ weight.T
ForgetsToDivide: layer 0's share is 2 × the correct gradient
    flat.div_(ctx.comm.size) -> flat
ReducesNothing: expected: the mean over all ranks' rows
    ctx.comm.reduce_scatter_tensor(mine, flat.div_(ctx.comm.size)) ->
        mine.copy_(flat.chunk(ctx.comm.size)[ctx.comm.rank])
ReducesToAll: calls all_reduce
    ctx.comm.reduce_scatter_tensor(mine, flat.div_(ctx.comm.size)) ->
        ctx.comm.all_reduce(flat.div_(ctx.comm.size))
        mine.copy_(flat.chunk(ctx.comm.size)[ctx.comm.rank])
GathersTwiceInBackward: bytes, 1.33 × the necessary bytes
    x, share = ctx.saved_tensors ->
        x, share = ctx.saved_tensors
        gather_unit(ctx.comm, share, [ctx.shape])
WrongGradientAtTheFirstLayer: the gradient of x is wrong
    return dy @ weight, mine -> return dy @ weight * (2 if weight.shape[1] == 12 else 1), mine
""")

# ---- forward_with_prefetch(comm, shares, layer, x, ahead)

Solution("08.forward_with_prefetch").slips("""
each_when_it_is_needed: with ahead=1, rank 0: when unit 0 computes, 1 of 2 gathers
    i + ahead + 1 -> i + 1
everything_at_once: computes, 6 gathers have started
    min(i + ahead + 1, len(shares)) -> len(shares)
keeps_what_has_computed: still holds memory
    under_way[i] = None -> pass
waits_at_once: has waited for 2 gathers
    under_way[j] = flat, handle ->
        under_way[j] = flat, handle
        handle.wait()
blocks: has waited for 2 gathers
    , async_op=True ->
    handle.wait() -> pass
the_last_unit_first: computes units [5, 4, 3, 2, 1, 0]
    under_way = {} -> under_way, shares = {}, shares[::-1]
    layer(i, flat, x) -> layer(len(shares) - 1 - i, flat, x)
""")

# ---- choose_units(layers, link, limit_bytes)

Solution("08.choose_units").slips("""
a_unit_for_each_layer: no less than with one unit per layer
    return ([1] * len(layers), 1)
one_unit: MB at its peak
    return ([len(layers)], 0)
drops_layers: does not split 34 layers into units
    return ([3] * (len(layers) // 3), 1)
forgets_the_prefetch: expected: (counts, prefetch)
    return [1] * len(layers)
negative_prefetch: prefetch is -1
    return ([1] * len(layers), -1)
""")


@right("08.choose_units")
def by_the_latency(layers, link, limit_bytes):
    if link.latency_s < 1e-4:
        return [1] * len(layers), 3
    return [1, *[3] * 10, 2, 1], 1
