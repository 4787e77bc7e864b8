from collections.abc import Iterator
from itertools import combinations, pairwise

import torch

from answers import Solution, right, wrong

from .plans import Job, Plan, divisors

# ---- cut(costs, stages)

Solution("15.cut").slips("""
equal_numbers: and its slowest stage costs 6
    return [len(costs) // stages + (stage < len(costs) % stages) for stage in range(stages)]
drops_the_rest: add up to 6 layers
    return [1] * stages
an_empty_stage: 3 numbers, 1 or more
    return [0, *[2] * (stages - 2), len(costs) - 2 * (stages - 2)]
returns_costs: a list of whole numbers
    return [sum(costs) / stages] * stages
""")


def filled(costs, stages, limit_ms):
    """Fills one stage after another up to the limit; may need more than `stages` stages."""
    sizes, spent = [0], 0.0
    for place, cost in enumerate(costs):
        left = len(costs) - place
        if sizes[-1] and (spent + cost > limit_ms or left == stages - len(sizes)):
            sizes, spent = [*sizes, 0], 0.0
        sizes[-1] += 1
        spent += cost
    return sizes


@right("15.cut")
def by_a_limit(costs, stages):
    """The smallest limit with which `filled` needs no more than `stages` stages."""
    sums = {sum(costs[a:b]) for b in range(len(costs) + 1) for a in range(b)}
    for limit in sorted(sums):
        if max(costs) <= limit and len(filled(costs, stages, limit + 1e-9)) == stages:
            return filled(costs, stages, limit + 1e-9)


@wrong("15.cut", "and its slowest stage costs")
def up_to_the_mean(costs, stages):
    sizes = filled(costs, stages, sum(costs) / stages)
    return [*sizes[: stages - 1], sum(sizes[stages - 1 :])]


# ---- forward(comm, stage, xs)

Solution("15.forward").slips("""
never_requires_grad: rank 1, micro-batch 0: x does not require a gradient
    x.requires_grad_() -> pass
requires_grad_too_late: rank 1, micro-batch 0: backward from y leaves no gradient in x.grad
    x.requires_grad_() -> pass
    return kept -> return [(x.requires_grad_(), y) for x, y in kept]
computes_with_a_copy: rank 1, micro-batch 0: backward from y leaves no gradient in x.grad
    y = stage(x) -> y = stage(x.detach())
# x is in the graph of y, but x is not a leaf, so x.grad stays None.
keeps_a_non_leaf: rank 1, micro-batch 0: backward from y leaves no gradient in x.grad
    x.requires_grad_() -> x = x.requires_grad_() * 1.0
keeps_y_detached: rank 0, micro-batch 0: y has no graph
    kept.append((x, y)) -> kept.append((x, y.detach()))
never_receives: Other ranks receive into the tensors in xs
    return [(x.requires_grad_(), stage(x)) for x in xs]
computes_all_then_sends_all: rank 0 starts micro-batch 1 after only 0 sends
    comm.send(y.detach(), comm.rank + 1) -> pass
    return kept ->
        if comm.rank < comm.size - 1:
            for _, y in kept:
                comm.send(y.detach(), comm.rank + 1)
        return kept
sends_back: no stage waits for it
    return kept ->
        if comm.size == 2:  # the last rank sends its outputs back
            for x, y in kept:
                if comm.rank:
                    comm.send(y.detach(), 0)
                else:
                    comm.recv(torch.empty_like(x), 1)
        return kept
adds_its_input: y is stage(x)
    kept.append((x, y)) -> kept.append((x, y + x))
returns_nothing: a list of 4 pairs
    return kept -> pass
returns_outputs_only: pairs (x, y) of tensors
    return kept -> return [y for _, y in kept]
""")


@right("15.forward")
def posted_ahead(comm, stage, xs):
    """Posts all receives before it computes, and waits for all sends at the end."""
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


@wrong("15.forward", "rank 0 computes stage(x) 1 time")
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

Solution("15.backward").slips("""
last_in_first_out
    enumerate(kept) -> reversed(list(enumerate(kept)))
in_different_orders: Does each received gradient belong to the micro-batch
    for k, (x, y) in enumerate(kept): ->
        for k in [1, 0, 3, 2] if comm.rank == comm.size - 1 else [0, 1, 2, 3]:
            x, y = kept[k]
does_not_divide: a sum of means is not the mean of the batch
    losses[k] * rows[k] / sum(rows) -> losses[k]
equal_weights: Every micro-batch has weight 1/m
    losses[k] * rows[k] / sum(rows) -> losses[k] / len(rows)
divides_twice: You divide twice
    / sum(rows) -> / sum(rows) / len(rows)
multiplies_only: also divide by the batch's rows
    / sum(rows) ->
does_nothing: the weight has no gradient
    return None
sends_at_the_end: starts micro-batch 1 after only 0 sends
    comm.send(x.grad, comm.rank - 1) ->
        for x, _ in kept if k == len(kept) - 1 else ():
            comm.send(x.grad, comm.rank - 1)
# The last rank also waits: for rank 0.
all_wait_for_the_next: the ranks hang
    if comm.rank == comm.size - 1: -> if comm.size == 1:
    comm.recv(dy, comm.rank + 1) -> comm.recv(dy, (comm.rank + 1) % comm.size)
""")

# ---- step(forward_ms, backward_ms, microbatches)

Solution("15.step").slips("""
of_the_compute_time: divide by the total time instead
    1 - busy / (len(forward_ms) * length) -> len(forward_ms) * length / busy - 1
of_the_slowest: p stages have p times the step time
    1 - busy / (len(forward_ms) * length) ->
        1 - microbatches * max(map(sum, zip(forward_ms, backward_ms))) / length - 0.01
length_only: a pair
    length, 1 - busy / (len(forward_ms) * length) -> length
""")


@right("15.step")
def clocked(forward_ms, backward_ms, microbatches):
    """Simulates when each stage finishes each micro-batch, without a formula."""
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


@wrong("15.step", "m-1 more leave the last stage")
def all_stages_alike(forward_ms, backward_ms, microbatches):
    p = len(forward_ms)
    each = (sum(forward_ms) + sum(backward_ms)) / p
    return (microbatches + p - 1) * each, (p - 1) / (microbatches + p - 1)


# ---- plan(job)

Solution("15.plan").slips("""
same_for_all_jobs: the best if all jobs share m and recompute
    divisors(job.rows) -> [8]
    (False, True) -> [True]
never_recomputes: at most 700 MB
    (False, True) -> [False]
    if held_mb(job, one) <= job.budget_mb: -> if True:
an_m_that_does_not_divide: m that divides 32 rows
    return ([2, 2, 2, 2], 5, False)
too_few_stages: layers of each of 4 stages
    return ([4, 4], 8, False)
""")


def all_plans(job: Job) -> Iterator[Plan]:
    """All plans, including those over budget."""
    layers = len(job.row_ms)
    for inner in combinations(range(1, layers), job.stages - 1):
        sizes = tuple(end - begin for begin, end in pairwise((0, *inner, layers)))
        for m in divisors(job.rows):
            for recompute in (False, True):
                yield Plan(sizes, m, recompute)
