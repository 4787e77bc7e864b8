from collections.abc import Iterator
from itertools import combinations, pairwise

import torch

from answers import right, wrong

from .plans import Job, Plan, divisors, held_mb, step_ms

# ---- cut(costs, stages)


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


@wrong("15.cut", "and its slowest stage costs 6")
def by_number(costs, stages):
    each, more = divmod(len(costs), stages)
    return [each + (stage < more) for stage in range(stages)]


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


@wrong("15.cut", "together 6 layers")
def loses_the_rest(costs, stages):
    return [1] * stages


@wrong("15.cut", "3 numbers from 1 on")
def an_empty_stage(costs, stages):
    return [0, *[2] * (stages - 2), len(costs) - 2 * (stages - 2)]


@wrong("15.cut", "a list of whole numbers")
def returns_costs(costs, stages):
    return [sum(costs) / stages] * stages


# ---- forward(comm, stage, xs)


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


def forward_right(comm, stage, xs, wants=True, graph=True):
    kept = []
    for x in xs:
        if comm.rank:
            comm.recv(x, comm.rank - 1)
            x.requires_grad_(wants)
        y = stage(x)
        if comm.rank < comm.size - 1:
            comm.send(y.detach(), comm.rank + 1)
        kept.append((x, y if graph else y.detach()))
    return kept


@wrong("15.forward", "rank 1, micro-batch 0: x does not require a gradient")
def forgets_the_gradient(comm, stage, xs):
    return forward_right(comm, stage, xs, wants=False)


@wrong("15.forward", "rank 1, micro-batch 0: backward from y leaves nothing in x.grad")
def asks_too_late(comm, stage, xs):
    kept = forward_right(comm, stage, xs, wants=False)
    return [(x.requires_grad_(), y) for x, y in kept]


@wrong("15.forward", "rank 1, micro-batch 0: backward from y leaves nothing in x.grad")
def computes_with_a_copy(comm, stage, xs):
    return forward_right(comm, lambda x: stage(x.detach()), xs)


@wrong("15.forward", "rank 1, micro-batch 0: backward from y leaves nothing in x.grad")
def keeps_what_is_no_leaf(comm, stage, xs):
    """The gradient is in the graph, and is not left in x.grad."""
    kept = []
    for x in xs:
        if comm.rank:
            comm.recv(x, comm.rank - 1)
            x = x.requires_grad_() * 1.0
        kept.append((x, stage(x)))
        if comm.rank < comm.size - 1:
            comm.send(kept[-1][1].detach(), comm.rank + 1)
    return kept


@wrong("15.forward", "rank 0, micro-batch 0: y has no graph")
def keeps_the_numbers(comm, stage, xs):
    return forward_right(comm, stage, xs, graph=False)


@wrong("15.forward", "The others' xs are places to receive into")
def computes_with_its_own(comm, stage, xs):
    return [(x.requires_grad_(), stage(x)) for x in xs]


@wrong("15.forward", "rank 0 begins to compute micro-batch 1 and has sent 0")
def computes_all_then_sends_all(comm, stage, xs):
    kept = []
    for x in xs:
        if comm.rank:
            comm.recv(x, comm.rank - 1)
            x.requires_grad_()
        kept.append((x, stage(x)))
    if comm.rank < comm.size - 1:
        for _, y in kept:
            comm.send(y.detach(), comm.rank + 1)
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


@wrong("15.forward", "nobody waits")
def sends_around(comm, stage, xs):
    kept = forward_right(comm, stage, xs)
    if comm.size == 2:  # the last one gives its outputs back, too
        for x, y in kept:
            if comm.rank:
                comm.send(y.detach(), 0)
            else:
                comm.recv(torch.empty_like(x), 1)
    return kept


@wrong("15.forward", "y is stage(x)")
def adds_its_input(comm, stage, xs):
    return [(x, y + x) for x, y in forward_right(comm, stage, xs)]


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


@wrong("15.forward", "a list of 4 pairs")
def returns_nothing(comm, stage, xs):
    forward_right(comm, stage, xs)


@wrong("15.forward", "pairs (x, y) of tensors")
def returns_outputs_only(comm, stage, xs):
    return [y for _, y in forward_right(comm, stage, xs)]


# ---- backward(comm, kept, losses, rows)


def backward_with(comm, kept, losses, weights, order=None):
    for k in order or range(len(kept)):
        x, y = kept[k]
        if comm.rank == comm.size - 1:
            (weights[k] * losses[k]).backward()
        else:
            dy = torch.empty_like(y)
            comm.recv(dy, comm.rank + 1)
            y.backward(dy)
        if comm.rank:
            comm.send(x.grad, comm.rank - 1)


@right("15.backward")
def last_in_first_out(comm, kept, losses, rows):
    """As GPipe has it."""
    weights = [n / sum(rows) for n in rows]
    backward_with(comm, kept, losses, weights, [3, 2, 1, 0])


@wrong("15.backward", "Does each gradient belong to the micro-batch")
def in_different_orders(comm, kept, losses, rows):
    weights = [n / sum(rows) for n in rows]
    order = [1, 0, 3, 2] if comm.rank == comm.size - 1 else [0, 1, 2, 3]
    backward_with(comm, kept, losses, weights, order)


@wrong("15.backward", "the sum of means is not the mean of the batch")
def does_not_divide(comm, kept, losses, rows):
    backward_with(comm, kept, losses, [1.0] * 4)


@wrong("15.backward", "Every micro-batch counts 1/m")
def all_alike(comm, kept, losses, rows):
    backward_with(comm, kept, losses, [1 / len(rows)] * 4)


@wrong("15.backward", "divided twice")
def divides_twice(comm, kept, losses, rows):
    backward_with(comm, kept, losses, [n / sum(rows) / len(rows) for n in rows])


@wrong("15.backward", "what are all rows together")
def multiplies_only(comm, kept, losses, rows):
    backward_with(comm, kept, losses, rows)


@wrong("15.backward", "its weight has no gradient")
def does_nothing(comm, kept, losses, rows):
    pass


@wrong("15.backward", "begins to compute micro-batch 1 and has sent 0")
def sends_at_the_end(comm, kept, losses, rows):
    for k, (_, y) in enumerate(kept):
        if comm.rank == comm.size - 1:
            (losses[k] * rows[k] / sum(rows)).backward()
        else:
            dy = torch.empty_like(y)
            comm.recv(dy, comm.rank + 1)
            y.backward(dy)
    if comm.rank:
        for x, _ in kept:
            comm.send(x.grad, comm.rank - 1)


@wrong("15.backward", "the ranks hang")
def all_wait_for_the_next(comm, kept, losses, rows):
    """The last one, too: for rank 0."""
    for k, (x, y) in enumerate(kept):
        dy = torch.empty_like(y)
        if comm.size > 1:
            comm.recv(dy, (comm.rank + 1) % comm.size)
            y.backward(dy)
        else:
            (losses[k] * rows[k] / sum(rows)).backward()
        if comm.rank:
            comm.send(x.grad, comm.rank - 1)


# ---- step(forward_ms, backward_ms, microbatches)


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


@wrong("15.step", "a part of the total is asked for")
def of_the_ideal(forward_ms, backward_ms, microbatches):
    length, bubble = clocked(forward_ms, backward_ms, microbatches)
    return length, bubble / (1 - bubble)


@wrong("15.step", "Of p stages for the whole step")
def of_the_slowest(forward_ms, backward_ms, microbatches):
    length, _ = clocked(forward_ms, backward_ms, microbatches)
    return length, 1 - microbatches * max(map(sum, zip(forward_ms, backward_ms))) / length - 0.01


@wrong("15.step", "a pair")
def length_only(forward_ms, backward_ms, microbatches):
    return clocked(forward_ms, backward_ms, microbatches)[0]


# ---- plan(job)


@right("15.plan")
def fits_and_is_shortest(job):
    return min((x for x in plans(job) if held_mb(job, x) <= job.budget_mb),
               key=lambda x: step_ms(job, x))  # fmt: skip


def fitting(job, m, recompute):
    its = [x for x in plans(job) if x[1:] == (m, recompute) and held_mb(job, x) <= job.budget_mb]
    return min(its, key=lambda x: step_ms(job, x))


def plans(job: Job) -> Iterator[Plan]:
    """Every plan that there is, within the budget or not."""
    layers = len(job.row_ms)
    for inner in combinations(range(1, layers), job.stages - 1):
        sizes = tuple(end - begin for begin, end in pairwise((0, *inner, layers)))
        for m in divisors(job.rows):
            for recompute in (False, True):
                yield Plan(sizes, m, recompute)


@wrong("15.plan", "the same m and the same answer")
def one_for_all(job):
    return fitting(job, 8, True)


@wrong("15.plan", "at most 700 MB")
def never_computes_again(job):
    return min((x for x in plans(job) if not x.recompute), key=lambda x: step_ms(job, x))


@wrong("15.plan", "m that divides 32 rows")
def an_m_that_does_not_divide(job):
    return [2, 2, 2, 2], 5, False


@wrong("15.plan", "layers of each of 4 stages")
def too_few_stages(job):
    return [4, 4], 8, False
