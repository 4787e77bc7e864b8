from itertools import pairwise, product

import torch
import torch.nn.functional as F

from answers import right, wrong
from labkit.parallel.common.conjugate import copy_to_ranks, gather_from_ranks, reduce_from_ranks

from .chain import TRAVELS, WAYS, held, in_turns, travels

# ---- Column: forward(ctx, comm, x, weight), backward(ctx, dy)


class Right(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comm, x, weight):
        ctx.comm = comm
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dy.mm(weight)
        handle = ctx.comm.all_reduce(dx, async_op=True)
        dweight = dy.t().mm(x)
        handle.wait()
        return None, dx, dweight


right("13.Column")(Right)


@wrong("13.Column", "gradient of x is")
class NeverAddsUp(Right):
    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return None, dy @ weight, dy.T @ x


@wrong("13.Column", "it had waited for its all-reduce")
class WaitsAtOnce(Right):
    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dy @ weight
        ctx.comm.all_reduce(dx)
        return None, dx, dy.T @ x


@wrong("13.Column", "it had not started its all-reduce")
class TheOtherProductFirst(Right):
    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dweight = dy.T @ x
        dx = dy @ weight
        ctx.comm.all_reduce(dx, async_op=True).wait()
        return None, dx, dweight


@wrong("13.Column", "gradient of the weight is")
class AddsUpTheWeightToo(Right):
    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dy @ weight
        handle = ctx.comm.all_reduce(dx, async_op=True)
        dweight = dy.T @ x
        ctx.comm.all_reduce(dweight)
        handle.wait()
        return None, dx, dweight


@wrong("13.Column", "rank 0 calls ['all_reduce'] in forward")
class AddsUpInForward(Right):
    @staticmethod
    def forward(ctx, comm, x, weight):
        ctx.comm = comm
        ctx.save_for_backward(x, weight)
        y = F.linear(x, weight)
        comm.all_reduce(y.clone())
        return y


@wrong("13.Column", "has no gradient of x")
class GivesTheWeightOnly(Right):
    @staticmethod
    def backward(ctx, dy):
        return None, None, dy.T @ ctx.saved_tensors[0]


@wrong("13.Column", "rank 0's output is")
class GathersTheOutput(Right):
    @staticmethod
    def forward(ctx, comm, x, weight):
        ctx.comm = comm
        ctx.save_for_backward(x, weight)
        return gather_from_ranks(F.linear(x, weight), comm, dim=1)


# ---- mlp(comm, x, up, down)


@right("13.mlp")
def transposed_by_hand(comm, x, up, down):
    y = reduce_from_ranks(F.gelu(up(copy_to_ranks(x, comm))) @ down.weight.t(), comm)
    return y.add(down.bias)


@wrong("13.mlp", "bias of `down` too large")
def bias_on_every_rank(comm, x, up, down):
    return reduce_from_ranks(down(F.gelu(up(copy_to_ranks(x, comm)))), comm)


@wrong("13.mlp", "gradient of down.bias is 0.5 × the right one")
def a_part_of_the_bias_on_every_rank(comm, x, up, down):
    hidden = F.gelu(up(copy_to_ranks(x, comm)))
    return reduce_from_ranks(F.linear(hidden, down.weight, down.bias / comm.size), comm)


@wrong("13.mlp", "there is one part only")
def a_part_of_the_bias_after_the_sum(comm, x, up, down):
    hidden = F.gelu(up(copy_to_ranks(x, comm)))
    return reduce_from_ranks(F.linear(hidden, down.weight), comm) + down.bias / comm.size


@wrong("13.mlp", "on 2 ranks, rank 0 sends")
def the_bias_there_and_back(comm, x, up, down):
    hidden = F.gelu(up(copy_to_ranks(x, comm)))
    bias = reduce_from_ranks(copy_to_ranks(down.bias, comm) / comm.size, comm)
    return reduce_from_ranks(F.linear(hidden, down.weight), comm) + bias


@wrong("13.mlp", "gradient of down.bias")
def bias_on_rank_0(comm, x, up, down):
    hidden = F.gelu(up(copy_to_ranks(x, comm)))
    return reduce_from_ranks(F.linear(hidden, down.weight, down.bias * (comm.rank == 0)), comm)


@wrong("13.mlp", "The bias of `down` is missing")
def no_bias(comm, x, up, down):
    hidden = F.gelu(up(copy_to_ranks(x, comm)))
    return reduce_from_ranks(F.linear(hidden, down.weight), comm)


@wrong("13.mlp", "after the second, add up")
def f_and_g_swapped(comm, x, up, down):
    hidden = F.gelu(up(reduce_from_ranks(x, comm)))
    return copy_to_ranks(F.linear(hidden, down.weight), comm) + down.bias


@wrong("13.mlp", "gradient of x is")
def no_f(comm, x, up, down):
    return reduce_from_ranks(F.linear(F.gelu(up(x)), down.weight), comm) + down.bias


@wrong("13.mlp", "gradient of x is 2 × the right one")
def f_twice(comm, x, up, down):
    x = copy_to_ranks(copy_to_ranks(x, comm), comm)
    return reduce_from_ranks(F.linear(F.gelu(up(x)), down.weight), comm) + down.bias


@wrong("13.mlp", "rank 0 has no gradient of x")
def without_autograd(comm, x, up, down):
    y = F.linear(F.gelu(up(copy_to_ranks(x, comm))), down.weight).detach()
    comm.all_reduce(y)
    return y + down.bias


@wrong("13.mlp", "gradient of down.bias is 2 × the right one")
def bias_through_f(comm, x, up, down):
    hidden = F.gelu(up(copy_to_ranks(x, comm)))
    bias = copy_to_ranks(down.bias, comm)
    return reduce_from_ranks(F.linear(hidden, down.weight), comm) + bias


# ---- own_rows(heads, kv_heads, head_width, ranks, rank)


@right("13.own_rows")
def a_tensor(heads, kv_heads, head_width, ranks, rank):
    rows = torch.arange((heads + 2 * kv_heads) * head_width)
    parts = rows.split([heads * head_width, kv_heads * head_width, kv_heads * head_width])
    return torch.cat([part.chunk(ranks)[rank] for part in parts])


@wrong("13.own_rows", "cut each of them, by its own heads")
def one_piece(heads, kv_heads, head_width, ranks, rank):
    share = (heads + 2 * kv_heads) * head_width // ranks
    return list(range(rank * share, (rank + 1) * share))


@wrong("13.own_rows", "6 heads and 3 key-value heads of 2 features on 3 ranks: rank 0")
def as_many_keys_as_queries(heads, kv_heads, head_width, ranks, rank):
    share, rows = heads // ranks * head_width, []
    for i in range(3):
        begin = i * heads * head_width + rank * share
        rows += range(begin, begin + share)
    return rows


@wrong("13.own_rows", "rank 0 has other rows")
def heads_in_turns(heads, kv_heads, head_width, ranks, rank):
    rows, begin = [], 0
    for count in (heads, kv_heads, kv_heads):
        for head in range(rank, count, ranks):
            rows += range(begin + head * head_width, begin + (head + 1) * head_width)
        begin += count * head_width
    return rows


@wrong("13.own_rows", "The right rows, in another order")
def key_value_heads_first(heads, kv_heads, head_width, ranks, rank):
    rows = [int(row) for row in a_tensor(heads, kv_heads, head_width, ranks, rank)]
    q = heads // ranks * head_width
    return rows[q:] + rows[:q]


# ---- cross_entropy(comm, logits, targets)


def own(comm, logits, targets):
    """The target's logit where it is here, else 0."""
    at = targets - comm.rank * logits.shape[1]
    mine = (at >= 0) & (at < logits.shape[1])
    return logits.gather(1, at.where(mine, 0)[:, None])[:, 0] * mine


@right("13.cross_entropy")
def two_sums(comm, logits, targets):
    peak = logits.detach().max(dim=1).values
    comm.all_reduce(peak, op="max")
    logits = logits - peak[:, None]
    total = reduce_from_ranks(logits.exp().sum(1), comm)
    return (total.log() - reduce_from_ranks(own(comm, logits, targets), comm)).mean()


@wrong("13.cross_entropy", "loss is inf")
def without_the_peak(comm, logits, targets):
    total = reduce_from_ranks(logits.exp().sum(1), comm)
    return (total.log() - reduce_from_ranks(own(comm, logits, targets), comm)).mean()


@wrong("13.cross_entropy", "loss is")
def each_its_own_peak(comm, logits, targets):
    logits = logits - logits.detach().max(dim=1).values[:, None]
    total = reduce_from_ranks(logits.exp().sum(1), comm)
    return (total.log() - reduce_from_ranks(own(comm, logits, targets), comm)).mean()


@wrong("13.cross_entropy", "three numbers for each")
def gathers_all_logits(comm, logits, targets):
    return F.cross_entropy(gather_from_ranks(logits, comm, dim=1), targets)


@wrong("13.cross_entropy", "gradient of rank 0's logits is None")
def behind_autograds_back(comm, logits, targets):
    peak = logits.detach().max(dim=1).values
    comm.all_reduce(peak, op="max")
    logits = (logits - peak[:, None]).detach()
    both = torch.stack([logits.exp().sum(1), own(comm, logits, targets)])
    comm.all_reduce(both)
    return (both[0].log() - both[1]).mean()


@wrong("13.cross_entropy", "the gradient of rank 0's logits is 2 × the right one")
def sums_there_and_back(comm, logits, targets):
    peak = logits.detach().max(dim=1).values
    comm.all_reduce(peak, op="max")
    logits = logits - peak[:, None]
    both = torch.stack([logits.exp().sum(1), own(comm, logits, targets)])
    total, picked = copy_to_ranks(reduce_from_ranks(both, comm), comm)
    return (total.log() - picked).mean()


@wrong("13.cross_entropy", "loss is")
def targets_of_all_ranks(comm, logits, targets):
    peak = logits.detach().max(dim=1).values
    comm.all_reduce(peak, op="max")
    logits = logits - peak[:, None]
    total = reduce_from_ranks(logits.exp().sum(1), comm)
    picked = logits.gather(1, targets[:, None] % logits.shape[1])[:, 0]
    return (total.log() - picked).mean()


# ---- choose_cuts(widths, ranks, budget)


@right("13.choose_cuts")
def every_way(widths, ranks, budget):
    fits = (w for w in product(WAYS, repeat=len(widths) - 1) if held(w, widths, ranks) <= budget)
    return list(min(fits, key=lambda ways: travels(ways, widths)))


@right("13.choose_cuts")
def layer_by_layer(widths, ranks, budget):
    """What is the least, for each way to cut the last layer and each number held so far?"""
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


@wrong("13.choose_cuts", "which columns and rows in turns need")
def columns_and_rows_in_turns(widths, ranks, budget):
    return in_turns()


@wrong("13.choose_cuts", "a rank holds")
def nothing_is_cut(widths, ranks, budget):
    return ["whole"] * (len(widths) - 1)


@wrong("13.choose_cuts", "which columns and rows in turns need")
def columns_only(widths, ranks, budget):
    return ["columns"] * (len(widths) - 1)


@wrong("13.choose_cuts", 'expected: 9 times "columns", "rows" or "whole"')
def one_too_many(widths, ranks, budget):
    return ["columns"] * len(widths)
