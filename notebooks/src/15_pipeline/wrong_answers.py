from collections.abc import Iterator
from itertools import combinations, pairwise

import torch

from answers import Solution, right, wrong

from .plans import Job, Plan, divisors

# ---- cut(costs, stages)

cut = Solution("15.cut")
cut.returns(
    "by_number",
    "and its slowest stage costs 6",
    "[len(costs) // stages + (stage < len(costs) % stages) for stage in range(stages)]",
)
cut.returns("loses_the_rest", "together 6 layers", "[1] * stages")
cut.returns(
    "an_empty_stage",
    "3 numbers from 1 on",
    "[0, *[2] * (stages - 2), len(costs) - 2 * (stages - 2)]",
)
cut.returns("returns_costs", "a list of whole numbers", "[sum(costs) / stages] * stages")


@right("15.cut")
def by_a_limit(costs, stages):
    """The smallest limit within which filling each stage needs no more stages than there are."""

    def filled(limit):
        sizes, spent = [0], 0.0
        for place, cost in enumerate(costs):
            left = len(costs) - place
            if sizes[-1] and (spent + cost > limit or left == stages - len(sizes)):
                sizes, spent = [*sizes, 0], 0.0
            sizes[-1] += 1
            spent += cost
        return sizes

    sums = {sum(costs[a:b]) for b in range(len(costs) + 1) for a in range(b)}
    for limit in sorted(sums):
        if max(costs) <= limit and len(filled(limit + 1e-9)) == stages:
            return filled(limit + 1e-9)


@wrong("15.cut", "and its slowest stage costs")
def up_to_the_mean(costs, stages):
    sizes, spent, mean = [0], 0.0, sum(costs) / stages
    for place, cost in enumerate(costs):
        left = len(costs) - place
        full = spent + cost > mean or left == stages - len(sizes)
        if sizes[-1] and full and len(sizes) < stages:
            sizes, spent = [*sizes, 0], 0.0
        sizes[-1] += 1
        spent += cost
    return sizes


# ---- forward(comm, stage, xs)

forward = Solution("15.forward")
forward.wrong(
    "forgets_the_gradient",
    "rank 1, micro-batch 0: x does not require a gradient",
    {"x.requires_grad_()": "pass"},
)
forward.wrong(
    "asks_too_late",
    "rank 1, micro-batch 0: backward from y leaves nothing in x.grad",
    {
        "x.requires_grad_()": "pass",
        "return kept": "return [(x.requires_grad_(), y) for x, y in kept]",
    },
)
forward.wrong(
    "computes_with_a_copy",
    "rank 1, micro-batch 0: backward from y leaves nothing in x.grad",
    {"y = stage(x)": "y = stage(x.detach())"},
)
# The gradient is in the graph, and is not left in x.grad.
forward.wrong(
    "keeps_what_is_no_leaf",
    "rank 1, micro-batch 0: backward from y leaves nothing in x.grad",
    {"x.requires_grad_()": "x = x.requires_grad_() * 1.0"},
)
forward.wrong(
    "keeps_the_numbers",
    "rank 0, micro-batch 0: y has no graph",
    {"kept.append((x, y))": "kept.append((x, y.detach()))"},
)
forward.returns(
    "computes_with_its_own",
    "The others' xs are places to receive into",
    "[(x.requires_grad_(), stage(x)) for x in xs]",
)
forward.wrong(
    "computes_all_then_sends_all",
    "rank 0 begins to compute micro-batch 1 and has sent 0",
    {
        """\
        if comm.rank < comm.size - 1:
            comm.send(y.detach(), comm.rank + 1)
        kept.append((x, y))
""": """\
        kept.append((x, y))
    if comm.rank < comm.size - 1:
        for _, y in kept:
            comm.send(y.detach(), comm.rank + 1)
"""
    },
)
forward.wrong(
    "sends_around",
    "nobody waits",
    {
        "    return kept": """\
    if comm.size == 2:  # the last one gives its outputs back, too
        for x, y in kept:
            if comm.rank:
                comm.send(y.detach(), 0)
            else:
                comm.recv(torch.empty_like(x), 1)
    return kept"""
    },
)
forward.wrong("adds_its_input", "y is stage(x)", {"kept.append((x, y))": "kept.append((x, y + x))"})
forward.wrong("returns_nothing", "a list of 4 pairs", {"return kept": "pass"})
forward.wrong(
    "returns_outputs_only",
    "pairs (x, y) of tensors",
    {"return kept": "return [y for _, y in kept]"},
)


@right("15.forward")
def posted_ahead(comm, stage, xs):
    """Every receive is posted before anything is computed, and no send is waited for till the
    end."""
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    coming = [] if first else [comm.irecv(x, comm.rank - 1, k) for k, x in enumerate(xs)]
    kept, leaving = [], []
    for k, x in enumerate(xs):
        if not first:
            coming[k].wait()
            x.requires_grad_()
        y = stage(x)
        if not last:
            leaving.append(comm.isend(y.detach(), comm.rank + 1, k))
        kept.append((x, y))
    for handle in leaving:
        handle.wait()
    return kept


@wrong("15.forward", "rank 0 computes 1 times")
def the_whole_batch(comm, stage, xs):
    rows, whole = [len(x) for x in xs], torch.cat(xs)
    if comm.rank:
        comm.recv(whole, comm.rank - 1)
        whole.requires_grad_()
    y = stage(whole)
    if comm.rank < comm.size - 1:
        comm.send(y.detach(), comm.rank + 1)
    return list(zip(whole.split(rows), y.split(rows)))


@wrong("15.forward", "the ranks hang")
def sends_before_it_receives(comm, stage, xs):
    kept = []
    for x in xs:
        y = stage(x)
        comm.send(y.detach(), (comm.rank + 1) % comm.size) if comm.size > 1 else None
        if comm.rank:
            comm.recv(x, comm.rank - 1)
        kept.append((x, y))
    return kept


# ---- backward(comm, kept, losses, rows)

backward = Solution("15.backward")
backward.right("last_in_first_out", {"enumerate(kept)": "reversed(list(enumerate(kept)))"})
backward.wrong(
    "in_different_orders",
    "Does each gradient belong to the micro-batch",
    {
        "    for k, (x, y) in enumerate(kept):\n": """\
    for k in [1, 0, 3, 2] if comm.rank == comm.size - 1 else [0, 1, 2, 3]:
        x, y = kept[k]
"""
    },
)
backward.wrong(
    "does_not_divide",
    "the sum of means is not the mean of the batch",
    {"losses[k] * rows[k] / sum(rows)": "losses[k]"},
)
backward.wrong(
    "all_alike",
    "Every micro-batch counts 1/m",
    {"losses[k] * rows[k] / sum(rows)": "losses[k] / len(rows)"},
)
backward.wrong("divides_twice", "divided twice", {"/ sum(rows)": "/ sum(rows) / len(rows)"})
backward.wrong("multiplies_only", "what are all rows together", {" / sum(rows)": ""})
backward.returns("does_nothing", "its weight has no gradient", "None")
backward.wrong(
    "sends_at_the_end",
    "begins to compute micro-batch 1 and has sent 0",
    {
        """\
        if comm.rank > 0:
            comm.send(x.grad, comm.rank - 1)
""": """\
    if comm.rank > 0:
        for x, _ in kept:
            comm.send(x.grad, comm.rank - 1)
"""
    },
)
# The last one waits, too: for rank 0.
backward.wrong(
    "all_wait_for_the_next",
    "the ranks hang",
    {
        "if comm.rank == comm.size - 1:": "if comm.size == 1:",
        "comm.recv(dy, comm.rank + 1)": "comm.recv(dy, (comm.rank + 1) % comm.size)",
    },
)

# ---- step(forward_ms, backward_ms, microbatches)

step = Solution("15.step")
step.wrong(
    "of_the_ideal",
    "a part of the total is asked for",
    {"1 - busy / (len(forward_ms) * length)": "len(forward_ms) * length / busy - 1"},
)
step.wrong(
    "of_the_slowest",
    "Of p stages for the whole step",
    {
        "1 - busy / (len(forward_ms) * length)": """
            1 - microbatches * max(map(sum, zip(forward_ms, backward_ms))) / length - 0.01
        """
    },
)
step.wrong("length_only", "a pair", {"length, 1 - busy / (len(forward_ms) * length)": "length"})


@right("15.step")
def clocked(forward_ms, backward_ms, microbatches):
    """No formula: when each stage is through with each micro-batch."""
    ended = [0.0] * len(forward_ms)
    for _ in range(microbatches):
        there = 0.0
        for stage, ms in enumerate(forward_ms):
            ended[stage] = there = max(there, ended[stage]) + ms
    for _ in range(microbatches):
        there = 0.0
        for stage in reversed(range(len(backward_ms))):
            ended[stage] = there = max(there, ended[stage]) + backward_ms[stage]
    busy = microbatches * (sum(forward_ms) + sum(backward_ms))
    return ended[0], 1 - busy / (len(forward_ms) * ended[0])


@wrong("15.step", "and m-1 more come out behind it")
def all_stages_alike(forward_ms, backward_ms, microbatches):
    p = len(forward_ms)
    each = (sum(forward_ms) + sum(backward_ms)) / p
    return (microbatches + p - 1) * each, (p - 1) / (microbatches + p - 1)


# ---- plan(job)

plan = Solution("15.plan")
plan.wrong(
    "one_for_all",
    "the same m and the same answer",
    {
        "divisors(job.rows)": "[8]",
        "(False, True)": "[True]",
    },
)
plan.wrong(
    "never_computes_again",
    "at most 700 MB",
    {
        "(False, True)": "[False]",
        "if held_mb(job, one) <= job.budget_mb:": "if True:",
    },
)
plan.returns("an_m_that_does_not_divide", "m that divides 32 rows", "([2, 2, 2, 2], 5, False)")
plan.returns("too_few_stages", "layers of each of 4 stages", "([4, 4], 8, False)")


def plans(job: Job) -> Iterator[Plan]:
    """Every plan that there is, within the budget or not."""
    layers = len(job.row_ms)
    for inner in combinations(range(1, layers), job.stages - 1):
        sizes = tuple(end - begin for begin, end in pairwise((0, *inner, layers)))
        for m in divisors(job.rows):
            for recompute in (False, True):
                yield Plan(sizes, m, recompute)
