import numpy as np
import torch

from answers import right, wrong

# ---- server_step(comm, model, optimizer)


def push(comm, model, share=None):
    share = comm.size if share is None else share
    for p in model.parameters():
        p.grad.div_(share)
        if comm.rank == 0:
            theirs = torch.empty_like(p.grad)
            for worker in range(1, comm.size):
                comm.recv(theirs, worker)
                p.grad.add_(theirs)
        else:
            comm.send(p.grad, 0)


def pull(comm, model):
    for p in model.parameters():
        if comm.rank == 0:
            for worker in range(1, comm.size):
                comm.send(p, worker)
        else:
            comm.recv(p.detach(), 0)


@right("04.server_step")
def with_gather_and_scatter(comm, model, optimizer):
    for p in model.parameters():
        every = [torch.empty_like(p) for _ in range(comm.size)] if comm.rank == 0 else None
        comm.gather(p.grad, every)
        p.grad = None if every is None else torch.stack(every).mean(dim=0)
    optimizer.step()  # finds nothing to do on a worker
    for p in model.parameters():
        comm.scatter(p.detach(), [p.detach()] * comm.size if comm.rank == 0 else None)


@wrong("04.server_step", "has moved 2 × as far as it should")
def forgets_to_divide(comm, model, optimizer):
    push(comm, model, share=1)
    if comm.rank == 0:
        optimizer.step()
    pull(comm, model)


@wrong("04.server_step", "has moved 0.5 × as far as it should")
def divides_twice(comm, model, optimizer):
    push(comm, model)
    if comm.rank == 0:
        for p in model.parameters():
            p.grad /= comm.size
        optimizer.step()
    pull(comm, model)


@wrong("04.server_step", "rank 1 still has its old 0.weight")
def throws_the_answer_away(comm, model, optimizer):
    push(comm, model)
    if comm.rank == 0:
        optimizer.step()
    for p in model.parameters():
        if comm.rank == 0:
            for worker in range(1, comm.size):
                comm.send(p, worker)
        else:
            comm.recv(torch.empty_like(p), 0)


@wrong("04.server_step", "rank 1 has an optimizer state for 8 parameters")
def everybody_steps(comm, model, optimizer):
    push(comm, model)
    optimizer.step()
    pull(comm, model)


@wrong("04.server_step", "rank 1 has an optimizer state for 8 parameters")
def averages_the_weights(comm, model, optimizer):
    optimizer.step()
    for p in model.parameters():
        comm.all_reduce(p.detach(), "mean")


@wrong("04.server_step", "is not that of a single process")
def the_server_forgets_its_own(comm, model, optimizer):
    if comm.rank == 0:
        for p in model.parameters():
            p.grad.zero_()
    push(comm, model)
    if comm.rank == 0:
        optimizer.step()
    pull(comm, model)


@wrong("04.server_step", "on 4 ranks, rank 0 sends")
def lets_a_tree_pass_the_weights_on(comm, model, optimizer):
    push(comm, model)
    if comm.rank == 0:
        optimizer.step()
    for p in model.parameters():
        comm.broadcast(p.detach(), algorithm="tree")


@wrong("04.server_step", "the ranks hang")
def all_send_first(comm, model, optimizer):
    for p in model.parameters():
        for rank in range(comm.size):
            if rank != comm.rank:
                comm.send(p.grad, rank)


# ---- staleness(order)


@wrong("04.staleness", "with order=[1, 2, 3, 1, 2, 3] your function returned")
def always_that_of_taking_turns(order):
    return [len(set(order)) - 1] * len(order)


@wrong("04.staleness", "with order=[1, 1, 1] your function returned")
def counts_its_own_push(order):
    pulled, found = {}, []
    for version, worker in enumerate(order):
        found.append(version - pulled.get(worker, 0))
        pulled[worker] = version
    return found


@wrong("04.staleness", "with order=[1, 2, 3, 1, 2, 3] your function returned")
def begins_with_the_first_push(order):
    pulled, found = {}, []
    for version, worker in enumerate(order):
        found.append(version - pulled.get(worker, version))
        pulled[worker] = version + 1
    return found


@wrong("04.staleness", "your function has a `yield`")
def one_after_the_other(order):
    yield from [0] * len(order)


@wrong("04.staleness", "returned None, but a list is right")
def forgets_to_return(order):
    sum(order)


# ---- serve(comm, w, lr, pushes)


@wrong("04.serve", "the ranks hang")
def in_turns(comm, w, lr, pushes):
    taken, gradient = [], torch.empty_like(w)
    for _ in range(pushes):
        for worker in range(1, comm.size):
            comm.recv(gradient, worker)
            w -= lr * gradient
            comm.send(w, worker)
            taken.append(worker)
    return taken


@wrong("04.serve", "the ranks hang")
def one_worker_after_the_other(comm, w, lr, pushes):
    taken, gradient = [], torch.empty_like(w)
    for worker in range(1, comm.size):
        for _ in range(pushes):
            comm.recv(gradient, worker)
            w -= lr * gradient
            comm.send(w, worker)
            taken.append(worker)
    return taken


def as_they_come(comm, w, lr, pushes, apply):
    room = {worker: torch.empty_like(w) for worker in range(1, comm.size)}
    coming = {worker: comm.irecv(room[worker], worker) for worker in room}
    taken = []
    while coming:
        for worker, handle in list(coming.items()):
            if handle.is_completed():
                handle.wait()
                w = apply(comm, w, lr, room[worker], worker)
                taken.append(worker)
                del coming[worker]
                if taken.count(worker) < pushes:
                    coming[worker] = comm.irecv(room[worker], worker)
    return taken


@wrong("04.serve", "worker 1 pulls wrong weights after its push 0")
def answers_before_it_steps(comm, w, lr, pushes):
    def apply(comm, w, lr, gradient, worker):
        comm.send(w, worker)
        w -= lr * gradient
        return w

    return as_they_come(comm, w, lr, pushes, apply)


@wrong("04.serve", "worker 1 pulls wrong weights after its push 0")
def divides_by_the_workers(comm, w, lr, pushes):
    def apply(comm, w, lr, gradient, worker):
        w -= lr * gradient / (comm.size - 1)
        comm.send(w, worker)
        return w

    return as_they_come(comm, w, lr, pushes, apply)


@wrong("04.serve", "w on rank 0 ends as")
def keeps_the_weights_to_itself(comm, w, lr, pushes):
    def apply(comm, w, lr, gradient, worker):
        w = w - lr * gradient
        comm.send(w, worker)
        return w

    return as_they_come(comm, w, lr, pushes, apply)


@wrong("04.serve", "serve returned None")
def returns_nothing(comm, w, lr, pushes):
    def apply(comm, w, lr, gradient, worker):
        w -= lr * gradient
        comm.send(w, worker)
        return w

    as_they_come(comm, w, lr, pushes, apply)


# ---- place(nbytes, servers)


@wrong("04.place", "no less than with one server")
def one_for_all(nbytes, servers):
    return [0] * len(nbytes)


@wrong("04.place", "that is not a server for each parameter")
def counts_from_one(nbytes, servers):
    return [1 + i % servers for i in range(len(nbytes))]


@wrong("04.place", "that is not a server for each parameter")
def lists_of_parameters(nbytes, servers):
    return [list(range(i, len(nbytes), servers)) for i in range(servers)]


@wrong("04.place", "the ranks")
def another_place_on_each_rank(nbytes, servers):
    from labkit import Comm

    return [(i + Comm().rank) % servers for i in range(len(nbytes))]


@right("04.place")
def numbers_of_numpy(nbytes, servers):
    return list(np.arange(len(nbytes)) % servers)
