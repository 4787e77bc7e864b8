import numpy as np
import torch

from answers import Solution, right, wrong

# ---- server_step(comm, model, optimizer)

Solution("04.server_step").slips("""
forgets_to_divide: has moved 2 × as far as it should
    p.grad /= comm.size -> pass
divides_twice: has moved 0.5 × as far as it should
    /= comm.size -> /= comm.size**2
throws_the_answer_away: rank 1 still has its old 0.weight
    comm.recv(p.detach(), 0) -> comm.recv(torch.empty_like(p), 0)
everybody_steps: rank 1 has an optimizer state for 8 parameters
    if comm.rank == 0:
        optimizer.step() ->
        optimizer.step()
the_server_forgets_its_own: is not that of a single process
    theirs = torch.empty_like(p.grad) -> theirs = torch.empty_like(p.grad.zero_())
lets_a_tree_pass_the_weights_on: on 4 ranks, rank 0 sends
    if comm.rank == 0:
        for worker in range(1, comm.size):
            comm.send(p, worker)
    else:
        comm.recv(p.detach(), 0) ->
        comm.broadcast(p.detach(), algorithm="tree")
""")


@right("04.server_step")
def with_gather_and_scatter(comm, model, optimizer):
    for p in model.parameters():
        every = [torch.empty_like(p) for _ in range(comm.size)] if comm.rank == 0 else None
        comm.gather(p.grad, every)
        p.grad = None if every is None else torch.stack(every).mean(dim=0)
    optimizer.step()  # finds nothing to do on a worker
    for p in model.parameters():
        comm.scatter(p.detach(), [p.detach()] * comm.size if comm.rank == 0 else None)


@wrong("04.server_step", "rank 1 has an optimizer state for 8 parameters")
def averages_the_weights(comm, model, optimizer):
    optimizer.step()
    for p in model.parameters():
        comm.all_reduce(p.detach(), "mean")


@wrong("04.server_step", "the ranks hang")
def all_send_first(comm, model, optimizer):
    for p in model.parameters():
        for rank in range(comm.size):
            if rank != comm.rank:
                comm.send(p.grad, rank)


# ---- staleness(order)

Solution("04.staleness").slips("""
always_that_of_taking_turns: with order=[1, 2, 3, 1, 2, 3] your function returned
    return [len(set(order)) - 1] * len(order)
counts_its_own_push: with order=[1, 1, 1] your function returned
    version + 1 -> version
begins_with_the_first_push: with order=[1, 2, 3, 1, 2, 3] your function returned
    pulled.get(worker, 0) -> pulled.get(worker, version)
one_after_the_other: your function has a `yield`
    found.append(version - pulled.get(worker, 0)) -> yield version - pulled.get(worker, 0)
forgets_to_return: returned None, but a list is right
    return found -> found
""")

# ---- serve(comm, w, lr, pushes)

Solution("04.serve").slips("""
answers_before_it_steps: worker 1 pulls wrong weights after its push 0
    w -= lr * room[worker]
    comm.send(w, worker) ->
        comm.send(w, worker)
        w -= lr * room[worker]
divides_by_the_workers: worker 1 pulls wrong weights after its push 0
    lr * room[worker] -> lr * room[worker] / (comm.size - 1)
keeps_the_weights_to_itself: w on rank 0 ends as
    w -= lr -> w = w - lr
returns_nothing: serve returned None
    return taken -> pass
""")


def takes_pushes_of(workers, comm, w, lr):
    gradient = torch.empty_like(w)
    for worker in workers:
        comm.recv(gradient, worker)
        w -= lr * gradient
        comm.send(w, worker)
    return workers


@wrong("04.serve", "the ranks hang")
def in_turns(comm, w, lr, pushes):
    return takes_pushes_of([*range(1, comm.size)] * pushes, comm, w, lr)


@wrong("04.serve", "the ranks hang")
def one_worker_after_the_other(comm, w, lr, pushes):
    return takes_pushes_of(sorted([*range(1, comm.size)] * pushes), comm, w, lr)


# ---- place(nbytes, servers)

Solution("04.place").slips("""
one_for_all: no less than with one server
    return [0] * len(nbytes)
counts_from_one: that is not a server for each parameter
    return [1 + i % servers for i in range(len(nbytes))]
lists_of_parameters: that is not a server for each parameter
    return [list(range(i, len(nbytes), servers)) for i in range(servers)]
another_place_on_each_rank: the ranks
    return [(i + Comm().rank) % servers for i in range(len(nbytes))]
""")


@right("04.place")
def numbers_of_numpy(nbytes, servers):
    return list(np.arange(len(nbytes)) % servers)
