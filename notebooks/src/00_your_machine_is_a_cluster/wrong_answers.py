import torch

from answers import wrong

# ---- average(comm, value)


@wrong("00.average", "rank 0 returned -2.75, but -1.375 is right")
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


@wrong("00.average", "returned 0.25, but -1.375 is right")
def takes_half_of_the_largest(comm, value):
    x = torch.tensor(value)
    comm.all_reduce(x, op="max")
    return x.item() / 2


@wrong("00.average", "but -1.375 is right")
def counts_in_whole_numbers(comm, value):
    x = torch.tensor(value).to(torch.int64)
    comm.all_reduce(x)
    return x.item() // comm.size


@wrong("00.average", "only tensors travel, not a float; put it into one: torch.tensor([value])")
def hands_over_the_number(comm, value):
    comm.all_reduce(value)
    return value / comm.size


@wrong("00.average", "your function has a `yield`, so its body never ran")
def yields(comm, value):
    x = torch.tensor(value)
    yield comm.all_reduce(x)
    return x.item() / comm.size


# ---- swap(comm, x)


@wrong("00.swap", "All of them wait in a send: one must do the other first")
def both_send_first(comm, x):
    theirs = torch.empty_like(x)
    comm.send(x, comm.rank ^ 1)
    comm.recv(theirs, comm.rank ^ 1)
    return theirs


@wrong("00.swap", "rank 0 returns before its send is over")
def does_not_wait_for_its_send(comm, x):
    theirs = torch.empty_like(x)
    comm.isend(x, comm.rank ^ 1)
    comm.recv(theirs, comm.rank ^ 1)
    return theirs


@wrong("00.swap", "All of them wait in a recv: one must do the other first")
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


@wrong("00.my_broadcast", "comm.send(x, 2)  # rank 0")
def knows_four_ranks_only(comm, x):
    if comm.rank == 0:
        comm.send(x, 2)  # rank 0
    else:
        comm.send(x, 3)  # rank 1


@wrong("00.my_broadcast", "isend only starts it and returns a handle: wait for the handle")
def waits_for_nothing(comm, x):
    if comm.rank == 0:
        for other in range(1, comm.size):
            comm.isend(x, other)
    else:
        comm.irecv(x, 0)


@wrong("00.my_broadcast", "2 ranks send 0 bytes together, fewer than the 20 of x")
def knows_the_numbers(comm, x):
    x.copy_(torch.arange(5.0))


@wrong("00.my_broadcast", "your function has a `yield`")
def yields_as_the_library_does(comm, x):
    for other in range(1, comm.size):
        if comm.rank == 0:
            yield comm.isend(x, other)
        elif comm.rank == other:
            yield comm.irecv(x, 0)


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


@wrong("00.find_max", "the two largest lie as close as float32 can")
def sends_half_precision(comm, values):
    return _place(comm, values, values.max().half())


@wrong("00.find_max", "the two largest lie as close as float32 can")
def sends_a_byte(comm, values):
    return _place(comm, values, (values.max() * 25 + 128).clamp(0, 255).to(torch.uint8))


@wrong("00.find_max", "rank 0 returned (3, ")
def rounds_and_takes_the_last_of_equals(comm, values):
    mine = values.max().half().reshape(1)
    every = [torch.empty_like(mine) for _ in range(comm.size)]
    comm.all_gather(every, mine)
    winner = max(range(comm.size), key=lambda rank: (float(every[rank]), rank))
    index = values.argmax().to(torch.int16).reshape(1)
    comm.broadcast(index, src=winner)
    return winner, int(index)


@wrong("00.find_max", "all values are below zero")
def starts_from_zero(comm, values):
    board = torch.zeros(comm.size)
    board[comm.rank] = values.max()
    comm.all_reduce(board, op="max")
    winner = int(board.argmax())
    index = values.argmax().reshape(1)
    comm.broadcast(index, src=winner)
    return winner, int(index)


@wrong("00.find_max", "raised NotImplementedError")
def finds_no_maximum_of_uint16(comm, values):
    index = values.argmax().to(torch.uint16).reshape(1)
    outs = [torch.empty_like(index) for _ in range(comm.size)]
    comm.all_gather(outs, index)
    return 0, int(torch.cat(outs).max())


@wrong("00.find_max", "raised ValueError: torch knows no max of torch.uint16")
def reduces_uint16(comm, values):
    index = values.argmax().to(torch.uint16).reshape(1)
    comm.all_reduce(index, op="max")
    return 0, int(index)


def _place(comm, values, mine):
    """The right place, if `mine` is told without loss."""
    every = [torch.empty_like(mine.reshape(1)) for _ in range(comm.size)]
    comm.all_gather(every, mine.reshape(1))
    winner = int(torch.cat(every).argmax())
    index = values.argmax().to(torch.int16).reshape(1)
    comm.broadcast(index, src=winner)
    return winner, int(index)
