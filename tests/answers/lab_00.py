import torch

from answers import wrong

# ---- average(comm, value)


@wrong("00.average", "rank 0 returned 10.0, but 5.0 is right")
def forgets_to_divide(comm, value):
    x = torch.tensor(value)
    comm.all_reduce(x)
    return x.item()


@wrong("00.average", "rank 0 returned None")
def forgets_to_return(comm, value):
    x = torch.tensor(value)
    comm.all_reduce(x, op="mean")


@wrong("00.average", "rank 0 needs more than one operation for it")
def collects_everything(comm, value):
    every = [torch.empty(1) for _ in range(comm.size)]
    comm.all_gather(every, torch.tensor([value]))
    comm.barrier()
    return torch.cat(every).mean().item()


@wrong("00.average", "the ranks hang: rank 0 returned without calling what rank 1 waits for")
def rank_0_stays_away(comm, value):
    x = torch.tensor(value)
    if comm.rank > 0:
        comm.all_reduce(x)
    return x.item() / comm.size


@wrong("00.average", "the ranks disagree about collective")
def ranks_disagree_on_the_shape(comm, value):
    x = torch.full((comm.rank + 1,), value)
    comm.all_reduce(x)
    return x[0].item() / comm.size


# ---- swap(comm, x)


@wrong("00.swap", "the ranks hang: ranks 0 and 1 wait for each other")
def both_receive_first(comm, x):
    theirs = torch.empty_like(x)
    comm.recv(theirs, comm.rank ^ 1)
    comm.send(x, comm.rank ^ 1)
    return theirs


@wrong("00.swap", "element [0] is 0, but 1 is right")
def receives_over_its_own(comm, x):
    partner = comm.rank ^ 1
    if comm.rank < partner:
        comm.send(x, partner)
        comm.recv(x, partner)
    else:
        comm.recv(x, partner)
        comm.send(x, partner)
    return x


@wrong("00.swap", "rank 0 sends 8,000 bytes")
def sends_to_all(comm, x):
    every = [torch.empty_like(x) for _ in range(comm.size)]
    for other in range(comm.size):
        comm.broadcast(every[other].copy_(x) if other == comm.rank else every[other], src=other)
    return every[comm.rank ^ 1]


@wrong("00.swap", "rank 2 raised ValueError: rank 5 is not in this group of 4")
def counts_wrong(comm, x):
    theirs = torch.empty_like(x)
    partner = comm.rank ^ 1 if comm.rank < 2 else comm.rank ^ 7
    if comm.rank < partner:
        comm.send(x, partner)
        comm.recv(theirs, partner)
    else:
        comm.recv(theirs, partner)
        comm.send(x, partner)
    return theirs


# ---- my_broadcast(comm, x)


@wrong("00.my_broadcast", "rank 0 calls broadcast")
def takes_the_ready_one(comm, x):
    comm.broadcast(x)


@wrong("00.my_broadcast", "rank 1 of 2 now holds a tensor that differs in 5 of 5 elements")
def receives_into_another_tensor(comm, x):
    if comm.rank == 0:
        for other in range(1, comm.size):
            comm.send(x, other)
    else:
        comm.recv(torch.empty_like(x), 0)


@wrong("00.my_broadcast", "3 ranks send 60 bytes together, but 40 are enough")
def goes_once_around(comm, x):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank > 0:
        comm.recv(x, left)
    if comm.size == 2 and comm.rank == 1:
        return
    comm.send(x, right)
    if comm.rank == 0 and comm.size > 2:
        comm.recv(x, left)


@wrong("00.my_broadcast", "raised ValueError: rank 0 cannot send to or receive from itself")
def sends_to_itself(comm, x):
    if comm.rank == 0:
        for other in range(comm.size):
            comm.send(x, other)
    else:
        comm.recv(x, 0)


# ---- find_max(comm, values)


@wrong("00.find_max", "rank 1 returned (1, 472), but (0, 393) is right")
def looks_at_its_own_only(comm, values):
    return comm.rank, int(values.argmax())


@wrong("00.find_max", "everybody sends all its values")
def collects_all_values(comm, values):
    every = [torch.empty_like(values) for _ in range(comm.size)]
    comm.all_gather(every, values)
    place = int(torch.cat(every).argmax())
    return place // len(values), place % len(values)


@wrong("00.find_max", "rank 0 returned a float, but a tuple is right")
def returns_the_value(comm, values):
    largest = values.max().clone()
    comm.all_reduce(largest, op="max")
    return largest.item()
