import torch

from answers import Solution, wrong

# ---- average(comm, value)

Solution("00.average").slips("""
forgets_to_divide: rank 0 returned -2.75; expected -1.375
    x.item() / comm.size -> x.item()
forgets_to_return: rank 0 returned None
    return x.item() -> x.item()
rank_0_skips_the_collective: the ranks hang: rank 1 waits for rank 0, which returned
    comm.all_reduce(x) -> if comm.rank > 0: comm.all_reduce(x)
ranks_disagree_on_the_shape: the ranks disagree about collective
    [value] -> [value] * (comm.rank + 1)
takes_half_of_the_largest: returned 0.25; expected -1.375
    comm.all_reduce(x) -> comm.all_reduce(x, op="max")
    / comm.size -> / 2
truncates_to_int: expected -1.375
    [value] -> [int(value)]
passes_a_number: only tensors can be sent, not float; wrap it: torch.tensor([value])
    comm.all_reduce(x) -> comm.all_reduce(value)
yields: your function has a `yield`, so its body never ran
    comm.all_reduce(x) -> yield comm.all_reduce(x)
""")


@wrong("00.average", "rank 0 does not compute the mean with one all_reduce")
def collects_everything(comm, value):
    gathered = [torch.empty(1) for _ in range(comm.size)]
    comm.all_gather(gathered, torch.tensor([value]))
    comm.barrier()
    return torch.cat(gathered).mean().item()


# ---- swap(comm, x)

Solution("00.swap").slips("""
both_send_first: All of them wait in a send: one must start with the other call
    if comm.rank < partner -> if comm.rank < comm.size
both_receive_first: All of them wait in a recv: one must start with the other call
    if comm.rank < partner -> if comm.rank < 0
does_not_wait_for_its_send: rank 0 returns before its send has completed
    comm.send(x, partner)
    comm.recv ->
        comm.isend(x, partner)
        comm.recv
receives_into_x: element [0] is 0; expected 1
    theirs = torch.empty_like(x) -> theirs = x
computes_a_wrong_partner: rank 2 raised ValueError: rank 5 is not in this group of 4
    partner = comm.rank ^ 1 -> partner = comm.rank ^ 1 if comm.rank < 2 else comm.rank ^ 7
""")


@wrong("00.swap", "rank 0 sends 8,000 bytes")
def sends_to_all(comm, x):
    gathered = [torch.empty_like(x) for _ in range(comm.size)]
    for other in range(comm.size):
        comm.broadcast(
            gathered[other].copy_(x) if other == comm.rank else gathered[other], src=other
        )
    return gathered[comm.rank ^ 1]


# ---- my_broadcast(comm, x)

Solution("00.my_broadcast").slips("""
calls_the_library: rank 0 calls broadcast
    return comm.broadcast(x)
creates_the_values: 2 ranks send 0 bytes in total, but at least 20 are needed
    return x.copy_(torch.arange(5.0))
receives_into_another_tensor: rank 1 of 2 now holds a tensor that differs in 5 of 5 elements
    comm.recv(x, -> comm.recv(torch.empty_like(x),
sends_to_itself: raised ValueError: rank 0 cannot send to or receive from itself
    comm.send(x, comm.rank + reach) -> comm.send(x, comm.rank)
never_waits: isend only starts the operation and returns a handle: call handle.wait
    comm.send( -> comm.isend(
    comm.recv( -> comm.irecv(
yields_as_the_library_does: your function has a `yield`
    comm.send( -> yield comm.isend(
""")


@wrong("00.my_broadcast", "3 ranks send 60 bytes in total, but 40 are enough")
def sends_around_the_ring(comm, x):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank > 0:
        comm.recv(x, left)
    if comm.size == 2 and comm.rank == 1:
        return
    comm.send(x, right)
    if comm.rank == 0 and comm.size > 2:
        comm.recv(x, left)


@wrong("00.my_broadcast", "comm.send(x, 2)  # rank 0")
def hardcodes_four_ranks(comm, x):
    if comm.rank == 0:
        comm.send(x, 2)  # rank 0
    else:
        comm.send(x, 3)  # rank 1


# ---- find_max(comm, values)

Solution("00.find_max").slips("""
uses_its_own_values_only: rank 1 returned (1, 472); expected (0, 393)
    return (comm.rank, int(values.argmax()))
returns_the_value: rank 0 returned a float; expected a tuple
    return winner, index.item() -> return torch.cat(largest).max().item()
sends_half_precision: the two largest values are adjacent in float32
    values.max() -> values.max().half()
    torch.empty(1) -> torch.empty(1).half()
sends_one_byte: the two largest values are adjacent in float32
    values.max() -> (values.max() * 25 + 128).clamp(0, 255).to(torch.uint8)
    torch.empty(1) -> torch.empty(1, dtype=torch.uint8)
rounds_and_takes_the_last_of_equals: rank 0 returned (3,
    values.max() -> values.max().half()
    torch.empty(1) -> torch.empty(1).half()
    int(torch.cat(largest).argmax()) ->
        max(range(comm.size), key=lambda rank: (float(largest[rank]), rank))
""")


@wrong("00.find_max", "bytes in total: each rank sends all its values")
def collects_all_values(comm, values):
    gathered = [torch.empty_like(values) for _ in range(comm.size)]
    comm.all_gather(gathered, values)
    place = int(torch.cat(gathered).argmax())
    return place // len(values), place % len(values)


@wrong("00.find_max", "all values are negative")
def starts_from_zero(comm, values):
    maxima = torch.zeros(comm.size)
    maxima[comm.rank] = values.max()
    comm.all_reduce(maxima, op="max")
    winner = int(maxima.argmax())
    index = values.argmax().reshape(1)
    comm.broadcast(index, src=winner)
    return winner, int(index)


@wrong("00.find_max", "raised NotImplementedError")
def finds_no_maximum_of_uint16(comm, values):
    index = values.argmax().to(torch.uint16).reshape(1)
    indices = [torch.empty_like(index) for _ in range(comm.size)]
    comm.all_gather(indices, index)
    return 0, int(torch.cat(indices).max())


@wrong("00.find_max", "raised ValueError: torch has no max of torch.uint16")
def reduces_uint16(comm, values):
    index = values.argmax().to(torch.uint16).reshape(1)
    comm.all_reduce(index, op="max")
    return 0, int(index)
