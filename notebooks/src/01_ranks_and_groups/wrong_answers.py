import time

import torch

from answers import wrong

# ---- where(rank, sizes)


@wrong("01.where", "rank 1 of a mesh dp=2, tp=2 is not at {'dp': 1, 'tp': 0}")
def first_axis_fastest(rank, sizes):
    found = {}
    for axis in sizes:
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


@wrong("01.where", "rank 2 of a mesh pp=2, dp=1, tp=3 is not at {'pp': 0, 'dp': 1, 'tp': 0}")
def as_if_all_sizes_were_two(rank, sizes):
    found = {}
    for axis in reversed(sizes):
        rank, found[axis] = divmod(rank, 2)
    return {axis: found[axis] for axis in sizes}


@wrong("01.where", "returned a tuple")
def without_names(rank, sizes):
    return divmod(rank, list(sizes.values())[-1])


@wrong("01.where", "ranks 0, 1, 2 and 3 raised KeyError: 'pp'")
def knows_three_axes_only(rank, sizes):
    rank, tp = divmod(rank, sizes["tp"])
    pp, dp = divmod(rank, sizes["dp"])
    return {"pp": pp % sizes["pp"], "dp": dp, "tp": tp}


# ---- groups_along(axis, sizes)


def places(sizes):
    total = 1
    for size in sizes.values():
        total *= size
    return total


@wrong("01.groups_along", "has a group [0, 1]")
def always_neighbours(axis, sizes):
    n = sizes[axis]
    return [list(range(i, i + n)) for i in range(0, places(sizes), n)]


@wrong("01.groups_along", "has a group [0, 2]")
def always_far(axis, sizes):
    n = places(sizes) // sizes[axis]
    groups = [list(range(i, places(sizes), n)) for i in range(n)]
    return groups


@wrong("01.groups_along", "the groups do not hold each rank once")
def only_rank_0s(axis, sizes):
    return [list(range(sizes[axis]))]


@wrong("01.groups_along", "has 4 groups")
def everybody_alone(axis, sizes):
    return [[rank] for rank in range(places(sizes))]


@wrong("01.groups_along", "a list of lists of ranks")
def only_ranks(axis, sizes):
    return list(range(places(sizes)))


# ---- my_barrier(store, rank, size, name)


@wrong("01.my_barrier", "rank 1 leaves the first barrier when 1 of 2 ranks have come")
def does_not_wait(store, rank, size, name):
    store.set(f"{name}/{rank}", "here")


@wrong("01.my_barrier", "do both barriers use the same keys?")
def uses_the_same_keys(store, rank, size, name):
    store.set(str(rank), "here")
    store.wait([str(other) for other in range(size)])


@wrong("01.my_barrier", "rank 0 leaves the first barrier when 1 of 2 ranks have come")
def only_the_others_wait(store, rank, size, name):
    if rank == 0:
        store.set(f"{name}/open", "yes")
    store.wait([f"{name}/open"])


@wrong("01.my_barrier", "store.wait sleeps")
def asks_again_and_again(store, rank, size, name):
    store.add(name, 1)
    while store.add(name, 0) < size:
        time.sleep(0.001)


@wrong("01.my_barrier", "store.wait waited 5 s for 'one/open', which no rank has set")
def nobody_opens(store, rank, size, name):
    if store.add(name, 1) == size + 1:
        store.set(f"{name}/open", "yes")
    store.wait([f"{name}/open"])


@wrong("01.my_barrier", "store.get waited 5 s for 'one/open', which no rank has set")
def gets_what_nobody_set(store, rank, size, name):
    store.get(f"{name}/open")


@wrong("01.my_barrier", "store.get returns bytes, b'4', which never equal the number 4")
def compares_bytes_with_a_number(store, rank, size, name):
    store.add(name, 1)
    while store.get(name) != size:
        pass


@wrong("01.my_barrier", "store.set('one', 0): the value is an int, not a text")
def sets_a_number(store, rank, size, name):
    store.set(name, 0)
    store.add(name, 1)


# ---- totals(comm, batches)


@wrong("01.totals", "the ranks hang: rank 1 returned without calling what rank 0 waits for")
def as_it_was(comm, batches):
    found = []
    for x in batches:
        comm.all_reduce(x)
        found.append(x.item())
    return found


@wrong("01.totals", "rank 0 returned 1 values, but 3 are right")
def stops_with_the_shortest(comm, batches):
    rounds = torch.tensor([len(batches)])
    comm.all_reduce(rounds, op="min")
    found = []
    for x in batches[: int(rounds)]:
        comm.all_reduce(x)
        found.append(x.item())
    return found


@wrong("01.totals", "but [11.0, 2.0, 3.0] is right")
def repeats_the_last(comm, batches):
    rounds = torch.tensor([len(batches)])
    comm.all_reduce(rounds, op="max")
    found = []
    for i in range(int(rounds)):
        x = batches[min(i, len(batches) - 1)].clone()
        comm.all_reduce(x)
        found.append(x.item())
    return found


@wrong("01.totals", "comm.all_reduce works in place and returns None")
def takes_what_is_returned(comm, batches):
    n = comm.all_reduce(torch.tensor([len(batches)]), op="max")
    return [0.0 for _ in range(n)]


@wrong("01.totals", "A batch has one dimension, shape [1], and is float32")
def adds_a_number_without_dimension(comm, batches):
    rounds = torch.tensor([len(batches)])
    comm.all_reduce(rounds, op="max")
    found = []
    for i in range(int(rounds)):
        x = batches[i] if i < len(batches) else torch.tensor(0.0)
        comm.all_reduce(x)
        found.append(x.item())
    return found


@wrong("01.totals", "operations for 2 rounds")
def agrees_every_round(comm, batches):
    found = []
    while True:
        more = torch.tensor([float(len(found) < len(batches))])
        comm.all_reduce(more)
        if not more.item():
            return found
        x = batches[len(found)] if len(found) < len(batches) else torch.zeros(1)
        comm.all_reduce(x)
        found.append(x.item())


# ---- place(rank)


@wrong("01.place", "88,000 bytes cross between nodes")
def dp_innermost(rank):
    pp, rest = divmod(rank, 6)
    tp, dp = divmod(rest, 3)
    return dp, pp, tp


@wrong("01.place", "ranks 0 and 1 are both at (0, 0, 0)")
def everybody_first(rank):
    return 0, 0, 0


@wrong("01.place", "place(4) is (0, 0, 2), which is outside the mesh")
def in_another_order(rank):
    pp, rest = divmod(rank, 6)
    dp, tp = divmod(rest, 2)
    return tp, pp, dp


@wrong("01.place", "place(0) returned 0")
def a_number(rank):
    return rank
