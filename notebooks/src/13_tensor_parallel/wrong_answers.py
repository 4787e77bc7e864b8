from itertools import pairwise

import torch
import torch.nn.functional as F

from answers import Solution, right, wrong
from labkit.parallel.common.conjugate import gather_from_ranks

from .chain import TRAVELS, WAYS

# ---- Column: forward(ctx, comm, x, weight), backward(ctx, dy)

column = Solution("13.Column")
column.right(
    "by_linear_and_mm",
    {
        "x @ weight.T": "F.linear(x, weight)",
        "dy @ weight": "dy.mm(weight)",
        "dy.T @ x": "dy.t().mm(x)",
    },
)
column.wrong(
    "NeverAddsUp",
    "gradient of x is",
    {
        "sending = ctx.comm.all_reduce(dx, async_op=True)": "pass",
        "sending.wait()": "pass",
    },
)
column.wrong(
    "WaitsAtOnce",
    "it had waited for its all-reduce",
    {
        "sending = ctx.comm.all_reduce(dx, async_op=True)": "ctx.comm.all_reduce(dx)",
        "sending.wait()": "pass",
    },
)
column.wrong(
    "TheOtherProductFirst",
    "it had not started its all-reduce",
    {
        """\
        sending = ctx.comm.all_reduce(dx, async_op=True)
        dweight = dy.T @ x
""": """\
        dweight = dy.T @ x
        dx = dy @ weight
        sending = ctx.comm.all_reduce(dx, async_op=True)
"""
    },
)
column.wrong(
    "AddsUpTheWeightToo",
    "gradient of the weight is",
    {
        "sending.wait()": """
            sending.wait()
            ctx.comm.all_reduce(dweight)
        """
    },
)
column.wrong(
    "AddsUpInForward",
    "rank 0 calls ['all_reduce'] in forward",
    {
        "return x @ weight.T": """
            comm.all_reduce(x @ weight.T)
            return x @ weight.T
        """
    },
)
column.wrong("GivesTheWeightOnly", "has no gradient of x", {"return None, dx": "return None, None"})
column.wrong(
    "GathersTheOutput",
    "rank 0's output is",
    {
        "return x @ weight.T": """
            parts = [x.new_empty(len(x), len(weight)) for _ in range(comm.size)]
            comm.all_gather(parts, x @ weight.T)
            return torch.cat(parts, dim=1)
        """
    },
)

# ---- mlp(comm, x, up, down)

mlp = Solution("13.mlp")
mlp.right("transposed_by_hand", {"F.linear(hidden, down.weight)": "hidden @ down.weight.t()"})
mlp.wrong(
    "bias_on_every_rank",
    "bias of `down` too large",
    {"F.linear(hidden, down.weight), comm) + down.bias": "down(hidden), comm)"},
)
mlp.wrong(
    "a_part_of_the_bias_on_every_rank",
    "gradient of down.bias is 0.5 × the right one",
    {"down.weight), comm) + down.bias": "down.weight, down.bias / comm.size), comm)"},
)
mlp.wrong(
    "a_part_of_the_bias_after_the_sum",
    "there is one part only",
    {"+ down.bias": "+ down.bias / comm.size"},
)
mlp.wrong(
    "the_bias_there_and_back",
    "on 2 ranks, rank 0 sends",
    {"+ down.bias": "+ reduce_from_ranks(copy_to_ranks(down.bias, comm) / comm.size, comm)"},
)
mlp.wrong(
    "bias_on_rank_0",
    "gradient of down.bias",
    {"down.weight), comm) + down.bias": "down.weight, down.bias * (comm.rank == 0)), comm)"},
)
mlp.wrong("no_bias", "The bias of `down` is missing", {" + down.bias": ""})
mlp.wrong(
    "f_and_g_swapped",
    "after the second, add up",
    {
        "copy_to_ranks(x": "reduce_from_ranks(x",
        "reduce_from_ranks(F": "copy_to_ranks(F",
    },
)
mlp.wrong("no_f", "gradient of x is", {"copy_to_ranks(x, comm)": "x"})
mlp.wrong(
    "f_twice",
    "gradient of x is 2 × the right one",
    {"copy_to_ranks(x, comm)": "copy_to_ranks(copy_to_ranks(x, comm), comm)"},
)
mlp.wrong(
    "without_autograd",
    "rank 0 has no gradient of x",
    {
        "return reduce_from_ranks(F.linear(hidden, down.weight), comm) + down.bias": """
            y = F.linear(hidden, down.weight).detach()
            comm.all_reduce(y)
            return y + down.bias
        """
    },
)
mlp.wrong(
    "bias_through_f",
    "gradient of down.bias is 2 × the right one",
    {"+ down.bias": "+ copy_to_ranks(down.bias, comm)"},
)

# ---- own_rows(heads, kv_heads, head_width, ranks, rank)

own_rows = Solution("13.own_rows")
own_rows.wrong(
    "one_piece",
    "cut each of them, by its own heads",
    {
        "return rows": """
            share = begin // ranks
            return list(range(rank * share, (rank + 1) * share))
        """
    },
)
own_rows.wrong(
    "as_many_keys_as_queries",
    "6 heads and 3 key-value heads of 2 features on 3 ranks: rank 0",
    {"(heads, kv_heads, kv_heads)": "(heads, heads, heads)"},
)
own_rows.wrong(
    "heads_in_turns",
    "rank 0 has other rows",
    {
        "rows += range(begin + rank * share, begin + (rank + 1) * share)": """
            for head in range(rank, count, ranks):
                rows += range(begin + head * head_width, begin + (head + 1) * head_width)
        """
    },
)
own_rows.wrong(
    "key_value_heads_first",
    "The right rows, in another order",
    {
        "return rows": """
            q = heads // ranks * head_width
            return rows[q:] + rows[:q]
        """
    },
)


@right("13.own_rows")
def a_tensor(heads, kv_heads, head_width, ranks, rank):
    rows = torch.arange((heads + 2 * kv_heads) * head_width)
    parts = rows.split([heads * head_width, kv_heads * head_width, kv_heads * head_width])
    return torch.cat([part.chunk(ranks)[rank] for part in parts])


# ---- cross_entropy(comm, logits, targets)

cross_entropy = Solution("13.cross_entropy")
cross_entropy.right(
    "two_sums",
    {
        "    both = torch.stack([shifted.exp().sum(dim=1), picked])\n": "",
        "total, picked = reduce_from_ranks(both, comm)": """
            total = reduce_from_ranks(shifted.exp().sum(dim=1), comm)
            picked = reduce_from_ranks(picked, comm)
        """,
    },
)
cross_entropy.wrong("without_the_peak", "loss is inf", {"logits - peak[:, None]": "logits"})
cross_entropy.wrong("each_its_own_peak", "loss is", {'comm.all_reduce(peak, op="max")': "pass"})
cross_entropy.wrong(
    "behind_autograds_back",
    "gradient of rank 0's logits is None",
    {
        "logits - peak[:, None]": "(logits - peak[:, None]).detach()",
        "total, picked = reduce_from_ranks(both, comm)": """
            comm.all_reduce(both)
            total, picked = both
        """,
    },
)
cross_entropy.wrong(
    "sums_there_and_back",
    "the gradient of rank 0's logits is 2 × the right one",
    {"reduce_from_ranks(both, comm)": "copy_to_ranks(reduce_from_ranks(both, comm), comm)"},
)
cross_entropy.wrong(
    "targets_of_all_ranks",
    "loss is",
    {
        "at.clamp(0, width - 1)[:, None])[:, 0] * mine": "targets[:, None] % width)[:, 0]",
        "total, picked = reduce_from_ranks": "total, _ = reduce_from_ranks",
    },
)


@wrong("13.cross_entropy", "three numbers for each")
def gathers_all_logits(comm, logits, targets):
    return F.cross_entropy(gather_from_ranks(logits, comm, dim=1), targets)


# ---- choose_cuts(widths, ranks, budget)

choose_cuts = Solution("13.choose_cuts")
choose_cuts.returns(
    "columns_and_rows_in_turns",
    "which columns and rows in turns need",
    '(["columns", "rows"] * len(widths))[: len(widths) - 1]',
)
choose_cuts.returns("nothing_is_cut", "a rank holds", '["whole"] * (len(widths) - 1)')
choose_cuts.returns(
    "columns_only", "which columns and rows in turns need", '["columns"] * (len(widths) - 1)'
)
choose_cuts.returns(
    "one_too_many", 'expected: 9 times "columns", "rows" or "whole"', '["columns"] * len(widths)'
)


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
