from collections.abc import Iterator
from itertools import combinations, pairwise

import torch

from answers import Solution, right, wrong

from .plans import Job, Plan, divisors

# ---- cut(costs, stages)

Solution("15.cut").slips("""
by_number: and its slowest stage costs 6
    return [len(costs) // stages + (stage < len(costs) % stages) for stage in range(stages)]
loses_the_rest: together 6 layers
    return [1] * stages
an_empty_stage: 3 numbers from 1 on
    return [0, *[2] * (stages - 2), len(costs) - 2 * (stages - 2)]
returns_costs: a list of whole numbers
    return [sum(costs) / stages] * stages
""")


def filled(costs, stages, limit_ms):
    """As many layers for each stage as it has time for; more stages than there are, if need be."""
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
    """The smallest limit within which filling each stage needs no more stages than there are."""
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
forgets_the_gradient: rank 1, micro-batch 0: x does not require a gradient
    x.requires_grad_() -> pass
asks_too_late: rank 1, micro-batch 0: backward from y leaves nothing in x.grad
    x.requires_grad_() -> pass
    return kept -> return [(x.requires_grad_(), y) for x, y in kept]
computes_with_a_copy: rank 1, micro-batch 0: backward from y leaves nothing in x.grad
    y = stage(x) -> y = stage(x.detach())
# The gradient is in the graph, and is not left in x.grad.
keeps_what_is_no_leaf: rank 1, micro-batch 0: backward from y leaves nothing in x.grad
    x.requires_grad_() -> x = x.requires_grad_() * 1.0
keeps_the_numbers: rank 0, micro-batch 0: y has no graph
    kept.append((x, y)) -> kept.append((x, y.detach()))
computes_with_its_own: The others' xs are places to receive into
    return [(x.requires_grad_(), stage(x)) for x in xs]
computes_all_then_sends_all: rank 0 begins to compute micro-batch 1 and has sent 0
    comm.send(y.detach(), comm.rank + 1) -> pass
    return kept ->
        if comm.rank < comm.size - 1:
            for _, y in kept:
                comm.send(y.detach(), comm.rank + 1)
        return kept
sends_around: nobody waits
    return kept ->
        if comm.size == 2:  # the last one gives its outputs back, too
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

Solution("15.backward").slips("""
last_in_first_out
    enumerate(kept) -> reversed(list(enumerate(kept)))
in_different_orders: Does each gradient belong to the micro-batch
    for k, (x, y) in enumerate(kept): ->
        for k in [1, 0, 3, 2] if comm.rank == comm.size - 1 else [0, 1, 2, 3]:
            x, y = kept[k]
does_not_divide: the sum of means is not the mean of the batch
    losses[k] * rows[k] / sum(rows) -> losses[k]
all_alike: Every micro-batch counts 1/m
    losses[k] * rows[k] / sum(rows) -> losses[k] / len(rows)
divides_twice: divided twice
    / sum(rows) -> / sum(rows) / len(rows)
multiplies_only: what are all rows together
    / sum(rows) ->
does_nothing: its weight has no gradient
    return None
sends_at_the_end: begins to compute micro-batch 1 and has sent 0
    comm.send(x.grad, comm.rank - 1) ->
        for x, _ in kept if k == len(kept) - 1 else ():
            comm.send(x.grad, comm.rank - 1)
# The last one waits, too: for rank 0.
all_wait_for_the_next: the ranks hang
    if comm.rank == comm.size - 1: -> if comm.size == 1:
    comm.recv(dy, comm.rank + 1) -> comm.recv(dy, (comm.rank + 1) % comm.size)
""")

# ---- step(forward_ms, backward_ms, microbatches)

Solution("15.step").slips("""
of_the_ideal: a part of the total is asked for
    1 - busy / (len(forward_ms) * length) -> len(forward_ms) * length / busy - 1
of_the_slowest: Of p stages for the whole step
    1 - busy / (len(forward_ms) * length) ->
        1 - microbatches * max(map(sum, zip(forward_ms, backward_ms))) / length - 0.01
length_only: a pair
    length, 1 - busy / (len(forward_ms) * length) -> length
""")


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

Solution("15.plan").slips("""
one_for_all: the same m and the same answer
    divisors(job.rows) -> [8]
    (False, True) -> [True]
never_computes_again: at most 700 MB
    (False, True) -> [False]
    if held_mb(job, one) <= job.budget_mb: -> if True:
an_m_that_does_not_divide: m that divides 32 rows
    return ([2, 2, 2, 2], 5, False)
too_few_stages: layers of each of 4 stages
    return ([4, 4], 8, False)
""")


def plans(job: Job) -> Iterator[Plan]:
    """Every plan that there is, within the budget or not."""
    layers = len(job.row_ms)
    for inner in combinations(range(1, layers), job.stages - 1):
        sizes = tuple(end - begin for begin, end in pairwise((0, *inner, layers)))
        for m in divisors(job.rows):
            for recompute in (False, True):
                yield Plan(sizes, m, recompute)
