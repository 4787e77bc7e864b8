from itertools import pairwise

import torch
import torch.nn.functional as F

from answers import Solution, right, wrong
from labkit.parallel.common.conjugate import gather_from_ranks

from .chain import TRAVELS, WAYS

# ---- Column: forward(ctx, comm, x, weight), backward(ctx, dy)

Solution("13.Column").slips("""
by_linear_and_mm
    x @ weight.T -> F.linear(x, weight)
    dy @ weight -> dy.mm(weight)
    dy.T @ x -> dy.t().mm(x)
NeverReduces: gradient of x is
    sending = ctx.comm.all_reduce(dx, async_op=True) -> pass
    sending.wait() -> pass
WaitsAtOnce: has already waited for its all-reduce
    sending = ctx.comm.all_reduce(dx, async_op=True) -> ctx.comm.all_reduce(dx)
    sending.wait() -> pass
WeightGradientFirst: has not yet started its all-reduce
    sending = ctx.comm.all_reduce(dx, async_op=True)
    dweight = dy.T @ x ->
        dweight = dy.T @ x
        dx = dy @ weight
        sending = ctx.comm.all_reduce(dx, async_op=True)
ReducesTheWeightGradientToo: gradient of the weight is
    sending.wait() ->
        sending.wait()
        ctx.comm.all_reduce(dweight)
ReducesInForward: rank 0 calls ['all_reduce'] in forward
    return x @ weight.T ->
        comm.all_reduce(x @ weight.T)
        return x @ weight.T
ReturnsNoGradientOfX: has no gradient of x
    return None, dx -> return None, None
GathersTheOutput: rank 0's output is
    return x @ weight.T ->
        parts = [x.new_empty(len(x), len(weight)) for _ in range(comm.size)]
        comm.all_gather(parts, x @ weight.T)
        return torch.cat(parts, dim=1)
""")

# ---- mlp(comm, x, up, down)

Solution("13.mlp").slips("""
transposed_by_hand
    F.linear(hidden, down.weight) -> hidden @ down.weight.t()
bias_on_every_rank: how many ranks add the bias?
    F.linear(hidden, down.weight), comm) + down.bias -> down(hidden), comm)
bias_divided_before_the_sum: gradient of down.bias is 0.5 × the correct tensor
    down.weight), comm) + down.bias -> down.weight, down.bias / comm.size), comm)
bias_divided_after_the_sum: Only 1/2 of the bias
    + down.bias -> + down.bias / comm.size
bias_through_f_and_g: on 2 ranks, rank 0 sends
    + down.bias -> + reduce_from_ranks(copy_to_ranks(down.bias, comm) / comm.size, comm)
bias_on_rank_0: gradient of down.bias
    down.weight), comm) + down.bias -> down.weight, down.bias * (comm.rank == 0)), comm)
no_bias: The bias of `down` is missing
    + down.bias ->
f_and_g_swapped: after the second, sum over the ranks
    copy_to_ranks(x -> reduce_from_ranks(x
    reduce_from_ranks(F -> copy_to_ranks(F
no_f: gradient of x is
    copy_to_ranks(x, comm) -> x
f_twice: gradient of x is 2 × the correct tensor
    copy_to_ranks(x, comm) -> copy_to_ranks(copy_to_ranks(x, comm), comm)
without_autograd: rank 0 has no gradient of x
    return reduce_from_ranks(F.linear(hidden, down.weight), comm) + down.bias ->
        y = F.linear(hidden, down.weight).detach()
        comm.all_reduce(y)
        return y + down.bias
bias_through_f: gradient of down.bias is 2 × the correct tensor
    + down.bias -> + copy_to_ranks(down.bias, comm)
""")

# ---- own_rows(heads, kv_heads, head_width, ranks, rank)

Solution("13.own_rows").slips("""
split_as_one_matrix: split each one separately, by its heads
    return rows ->
        share = begin // ranks
        return list(range(rank * share, (rank + 1) * share))
as_many_keys_as_queries: 6 heads and 3 key-value heads of 2 features on 3 ranks, rank 0
    (heads, kv_heads, kv_heads) -> (heads, heads, heads)
heads_round_robin: rank 0 has the wrong rows
    rows += range(begin + rank * share, begin + (rank + 1) * share) ->
        for head in range(rank, count, ranks):
            rows += range(begin + head * head_width, begin + (head + 1) * head_width)
key_value_heads_first: the right rows in the wrong order
    return rows ->
        q = heads // ranks * head_width
        return rows[q:] + rows[:q]
""")


@right("13.own_rows")
def a_tensor(heads, kv_heads, head_width, ranks, rank):
    rows = torch.arange((heads + 2 * kv_heads) * head_width)
    parts = rows.split([heads * head_width, kv_heads * head_width, kv_heads * head_width])
    return torch.cat([part.chunk(ranks)[rank] for part in parts])


# ---- cross_entropy(comm, logits, targets)

Solution("13.cross_entropy").slips("""
two_sums
    both = torch.stack([shifted.exp().sum(dim=1), picked]) ->
    total, picked = reduce_from_ranks(both, comm) ->
        total = reduce_from_ranks(shifted.exp().sum(dim=1), comm)
        picked = reduce_from_ranks(picked, comm)
without_the_peak: loss is inf
    logits - peak[:, None] -> logits
peak_of_each_rank: loss is
    comm.all_reduce(peak, op="max") -> pass
without_autograd: gradient of rank 0's logits is None
    logits - peak[:, None] -> (logits - peak[:, None]).detach()
    total, picked = reduce_from_ranks(both, comm) ->
        comm.all_reduce(both)
        total, picked = both
reduces_in_backward_too: the gradient of rank 0's logits is 2 × the correct tensor
    reduce_from_ranks(both, comm) -> copy_to_ranks(reduce_from_ranks(both, comm), comm)
targets_of_all_ranks: loss is
    at.clamp(0, width - 1)[:, None])[:, 0] * mine -> targets[:, None] % width)[:, 0]
    total, picked = reduce_from_ranks -> total, _ = reduce_from_ranks
""")


@wrong("13.cross_entropy", "three elements for each")
def gathers_all_logits(comm, logits, targets):
    return F.cross_entropy(gather_from_ranks(logits, comm, dim=1), targets)


# ---- choose_cuts(widths, ranks, budget)

Solution("13.choose_cuts").slips("""
alternating: which alternating columns and rows send
    return (["columns", "rows"] * len(widths))[: len(widths) - 1]
all_whole: a rank holds
    return ["whole"] * (len(widths) - 1)
columns_only: which alternating columns and rows send
    return ["columns"] * (len(widths) - 1)
one_too_many: a list of 9, each "columns", "rows" or "whole"
    return ["columns"] * len(widths)
""")


@right("13.choose_cuts")
def layer_by_layer(widths, ranks, budget):
    """The fewest bytes for each way to shard the last layer and each number of elements held."""
    reached = {("whole", 0): (0, [])}
    for before, after in pairwise(widths):
        following = {}
        for (last, numbers), (sent, ways) in reached.items():
            for way in WAYS:
                key = way, numbers + before * after // (1 if way == "whole" else ranks)
                least = sent + TRAVELS[last, way] * before
                if key[1] <= budget and least < following.get(key, (float("inf"),))[0]:
                    following[key] = least, [*ways, way]
        reached = following
    ends = [
        (s + TRAVELS[way, "whole"] * widths[-1], ways) for (way, _), (s, ways) in reached.items()
    ]
    return min(ends)[1]
