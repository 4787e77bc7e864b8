import time

import torch

from answers import Solution, wrong

# ---- where(rank, sizes)

Solution("01.where").slips("""
first_axis_fastest: where(1, {'dp': 2, 'tp': 2}) returned {'dp': 1, 'tp': 0}
    reversed(sizes) -> sizes
as_if_all_sizes_were_two: where(2, {'pp': 2, 'dp': 1, 'tp': 3}) returned {'pp': 0, 'dp': 1, 'tp': 0}
    divmod(rank, sizes[axis]) -> divmod(rank, 2)
without_names: returned a tuple
    {axis: found[axis] for axis in sizes} -> (*found.values(),)
""")


@wrong("01.where", "ranks 0, 1, 2 and 3 raised KeyError: 'pp'")
def hardcodes_three_axes(rank, sizes):
    rank, tp = divmod(rank, sizes["tp"])
    pp, dp = divmod(rank, sizes["dp"])
    return {"pp": pp % sizes["pp"], "dp": dp, "tp": tp}


# ---- groups_along(axis, sizes)

Solution("01.groups_along").slips("""
always_neighbors: returned the group [0, 1]
    return list(groups.values()) ->
        n = sizes[axis]
        return [list(range(i, i + n)) for i in range(0, total, n)]
always_strided: returned the group [0, 2]
    return list(groups.values()) ->
        n = total // sizes[axis]
        return [list(range(i, total, n)) for i in range(n)]
only_the_group_of_rank_0: not every rank is in exactly one group
    return [list(range(sizes[axis]))]
every_rank_alone: returned 4 groups
    list(groups.values()) -> [[rank] for rank in range(total)]
a_flat_list: a list of lists of ranks
    list(groups.values()) -> list(range(total))
""")

# ---- my_barrier(store, rank, size, name)

Solution("01.my_barrier").slips("""
does_not_wait: rank 1 left the first barrier when 1 of 2 ranks had arrived
    store.wait([f"{name}/open"]) -> pass
only_the_others_wait: rank 0 left the first barrier when 1 of 2 ranks had arrived
    if store.add(f"{name}/arrived", 1) == size: -> if rank == 0:
never_opens: store.wait timed out after 5 s: no rank has set 'one/open'
    == size -> == size + 1
gets_a_key_that_is_never_set: store.get timed out after 5 s: no rank has set 'one/open'
    return store.get(f"{name}/open")
sets_a_number: store.set('one', 0): the value must be a str, not an int
    store.set(f"{name}/open", "yes") -> store.set(name, 0)
""")


@wrong("01.my_barrier", "do both barriers use the same keys?")
def uses_the_same_keys(store, rank, size, name):
    store.set(str(rank), "here")
    store.wait([str(other) for other in range(size)])


@wrong("01.my_barrier", "store.wait sleeps")
def polls_the_store(store, rank, size, name):
    store.add(name, 1)
    while store.add(name, 0) < size:
        time.sleep(0.001)


@wrong("01.my_barrier", "store.get returns bytes: b'4' never equals the number 4")
def compares_bytes_with_a_number(store, rank, size, name):
    store.add(name, 1)
    while store.get(name) != size:
        pass


# ---- totals(comm, batches)

Solution("01.totals").slips("""
agrees_on_no_number_of_rounds: the ranks hang: rank 0 waits for rank 1, which returned
    comm.all_reduce(rounds, op="max") -> pass
stops_with_the_shortest: rank 0 returned a list of length 1; expected length 3
    op="max" -> op="min"
repeats_the_last: expected [11.0, 2.0, 3.0]
    batches[i] if i < len(batches) else torch.zeros(1) -> batches[min(i, len(batches) - 1)].clone()
uses_the_return_value: comm.all_reduce works in place and returns None
    comm.all_reduce(rounds -> rounds = comm.all_reduce(rounds
adds_a_scalar: a batch is float32, of shape [1]
    torch.zeros(1) -> torch.tensor(0.0)
""")


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

Solution("01.place").slips("""
dp_innermost: the ranks send 88,000 bytes between nodes
    {"dp": 3, "pp": 2, "tp": 2} -> {"pp": 2, "tp": 2, "dp": 3}
all_ranks_at_the_origin: ranks 0 and 1 are both at (0, 0, 0)
    return (0, 0, 0)
in_another_order: place(4) returned (0, 0, 2), which is outside the mesh
    {"dp": 3, "pp": 2, "tp": 2} -> {"pp": 2, "dp": 3, "tp": 2}
    found["dp"], found["pp"], found["tp"] -> found["tp"], found["pp"], found["dp"]
a_number: place(0) returned 0
    return rank
""")
