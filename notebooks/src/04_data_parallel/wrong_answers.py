import numpy as np
import torch

from answers import Solution, right, wrong

# ---- server_step(comm, model, optimizer)

Solution("04.server_step").slips("""
forgets_to_divide: the update of 0.weight on rank 0 is 2 × the correct update
    p.grad /= comm.size -> pass
divides_twice: the update of 0.weight on rank 0 is 0.5 × the correct update
    /= comm.size -> /= comm.size**2
discards_the_new_weights: 0.weight on rank 1 has not changed
    comm.recv(p.detach(), 0) -> comm.recv(torch.empty_like(p), 0)
every_rank_steps: rank 1 has optimizer state for 8 parameters
    if comm.rank == 0:
        optimizer.step() ->
        optimizer.step()
the_server_drops_its_gradient: expected: the weights of a single process
    theirs = torch.empty_like(p.grad) -> theirs = torch.empty_like(p.grad.zero_())
broadcasts_with_a_tree: on 4 ranks, rank 0 sends
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
        gradients = [torch.empty_like(p) for _ in range(comm.size)] if comm.rank == 0 else None
        comm.gather(p.grad, gradients)
        p.grad = None if gradients is None else torch.stack(gradients).mean(dim=0)
    optimizer.step()  # does nothing on a worker, which has no .grad
    for p in model.parameters():
        comm.scatter(p.detach(), [p.detach()] * comm.size if comm.rank == 0 else None)


@wrong("04.server_step", "rank 1 has optimizer state for 8 parameters")
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
assumes_that_workers_take_turns: with order=[1, 2, 3, 1, 2, 3], your function returned
    return [len(set(order)) - 1] * len(order)
counts_its_own_push: with order=[1, 1, 1], your function returned
    version + 1 -> version
begins_with_the_first_push: with order=[1, 2, 3, 1, 2, 3], your function returned
    pulled.get(worker, 0) -> pulled.get(worker, version)
yields_each_staleness: your function has a `yield`
    found.append(version - pulled.get(worker, 0)) -> yield version - pulled.get(worker, 0)
forgets_to_return: returned None; expected a list
    return found -> found
""")

# ---- serve(comm, w, lr, pushes)

Solution("04.serve").slips("""
answers_before_it_steps: worker 1 receives wrong weights after push 0
    w -= lr * room[worker]
    comm.send(w, worker) ->
        comm.send(w, worker)
        w -= lr * room[worker]
divides_by_the_workers: worker 1 receives wrong weights after push 0
    lr * room[worker] -> lr * room[worker] / (comm.size - 1)
rebinds_w: the final w on rank 0 is
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
one_server: no less than with one server
    return [0] * len(nbytes)
counts_from_one: which does not name a server for each parameter
    return [1 + i % servers for i in range(len(nbytes))]
lists_of_parameters: which does not name a server for each parameter
    return [list(range(i, len(nbytes), servers)) for i in range(servers)]
differs_between_ranks: the ranks
    return [(i + Comm().rank) % servers for i in range(len(nbytes))]
""")


@right("04.place")
def integers_of_numpy(nbytes, servers):
    return list(np.arange(len(nbytes)) % servers)
