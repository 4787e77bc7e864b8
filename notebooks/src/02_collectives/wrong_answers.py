from math import ceil, log2

import torch

from answers import right, wrong


def pass_on(comm, outgoing, incoming):
    handle = comm.isend(outgoing, (comm.rank + 1) % comm.size)
    comm.recv(incoming, (comm.rank - 1) % comm.size)
    handle.wait()


def scatter(comm, chunks, steps, shift=0):
    n, rank = comm.size, comm.rank
    for step in range(1, steps + 1):
        take = chunks[(rank - step - 1 + shift) % n]
        incoming = torch.empty_like(take)
        pass_on(comm, chunks[(rank - step + shift) % n], incoming)
        take += incoming


def gather(comm, chunks):
    n, rank = comm.size, comm.rank
    for step in range(n - 1):
        pass_on(comm, chunks[(rank - step) % n], chunks[(rank - step - 1) % n])


# ---- my_reduce_scatter(comm, chunks)


@wrong("02.my_reduce_scatter", "of 2 ranks, rank 0 ends with the numbers of rank 0 in chunk 0")
def ends_one_chunk_further(comm, chunks):
    scatter(comm, chunks, comm.size - 1, shift=1)


@wrong("02.my_reduce_scatter", "now holds in its own chunk a tensor that differs in")
def one_step_too_few(comm, chunks):
    scatter(comm, chunks, comm.size - 2)


@wrong("02.my_reduce_scatter", "rank 0 of 2 sends 32 bytes")
def one_step_too_many(comm, chunks):
    right = [chunk.clone() for chunk in chunks]
    scatter(comm, right, comm.size - 1)
    scatter(comm, [chunk.clone() for chunk in chunks], 1, shift=1)
    chunks[comm.rank].copy_(right[comm.rank])


@wrong("02.my_reduce_scatter", "rank 0 ends with the numbers of rank 1 in chunk 0")
def receives_over_its_own(comm, chunks):
    n, rank = comm.size, comm.rank
    for step in range(1, n):
        pass_on(comm, chunks[(rank - step) % n], chunks[(rank - step - 1) % n])


@wrong("02.my_reduce_scatter", "All of them wait in a send: one must do the other first")
def all_send_first(comm, chunks):
    n, rank = comm.size, comm.rank
    for step in range(1, n):
        take = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(take)
        comm.send(chunks[(rank - step) % n], (rank + 1) % n)
        comm.recv(incoming, (rank - 1) % n)
        take += incoming


@wrong("02.my_reduce_scatter", "rank 0 calls all_reduce")
def takes_the_ready_one(comm, chunks):
    for chunk in chunks:
        comm.all_reduce(chunk)


@wrong("02.my_reduce_scatter", "rank 0 of 3 sends to rank 2")
def sends_each_its_chunk_directly(comm, chunks):
    n, rank = comm.size, comm.rank
    for ahead in range(1, n):
        incoming = torch.empty_like(chunks[rank])
        handle = comm.isend(chunks[(rank + ahead) % n], (rank + ahead) % n)
        comm.recv(incoming, (rank - ahead) % n)
        handle.wait()
        chunks[rank] += incoming


@wrong("02.my_reduce_scatter", "on 2 ranks it takes 2 steps, but 1 is enough")
def one_after_the_other(comm, chunks):
    n, rank = comm.size, comm.rank
    for step in range(1, n):
        take = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(take)
        if rank == 0:
            comm.send(chunks[(rank - step) % n], (rank + 1) % n)
            comm.recv(incoming, (rank - 1) % n)
        else:
            comm.recv(incoming, (rank - 1) % n)
            comm.send(chunks[(rank - step) % n], (rank + 1) % n)
        take += incoming


@wrong("02.my_reduce_scatter", "on rank 0 chunk 0 is another tensor than the one you were given")
def sums_into_other_tensors(comm, chunks):
    n, rank = comm.size, comm.rank
    for step in range(1, n):
        take = (rank - step - 1) % n
        incoming = torch.empty_like(chunks[take])
        pass_on(comm, chunks[(rank - step) % n], incoming)
        chunks[take] = chunks[take] + incoming


@right("02.my_reduce_scatter")
def adds_to_the_item_of_the_list(comm, chunks):
    n, rank = comm.size, comm.rank
    for step in range(1, n):
        take = (rank - step - 1) % n
        incoming = torch.empty_like(chunks[take])
        pass_on(comm, chunks[(rank - step) % n], incoming)
        chunks[take] += incoming


@right("02.my_reduce_scatter")
def copies_the_sum_into_the_chunk(comm, chunks):
    n, rank = comm.size, comm.rank
    for step in range(1, n):
        take = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(take)
        pass_on(comm, chunks[(rank - step) % n], incoming)
        take.copy_(take + incoming)


# ---- my_all_gather(comm, chunks)


@wrong("02.my_all_gather", "on rank 0 chunk 1 is another tensor than the one you were given")
def puts_what_arrives_into_the_list(comm, chunks):
    n, rank = comm.size, comm.rank
    for step in range(n - 1):
        take = (rank - step - 1) % n
        incoming = torch.empty_like(chunks[take])
        pass_on(comm, chunks[(rank - step) % n], incoming)
        chunks[take] = incoming


@wrong("02.my_all_gather", "and overwrite what was there")
def adds_what_arrives(comm, chunks):
    scatter(comm, chunks, comm.size - 1, shift=1)


@wrong("02.my_all_gather", "rank 0 ends with the numbers of rank 2 for chunk 2 in chunk 1")
def always_sends_its_own(comm, chunks):
    n, rank = comm.size, comm.rank
    for step in range(n - 1):
        pass_on(comm, chunks[rank], chunks[(rank - step - 1) % n])


@wrong("02.my_all_gather", "of 2 ranks, rank 0 ends with nothing in chunk 1")
def never_receives_into_the_chunks(comm, chunks):
    gather(comm, [chunk.clone() for chunk in chunks])


@wrong("02.my_all_gather", "sends to rank 2")
def sends_its_own_to_all(comm, chunks):
    n, rank = comm.size, comm.rank
    for ahead in range(1, n):
        handle = comm.isend(chunks[rank], (rank + ahead) % n)
        comm.recv(chunks[(rank - ahead) % n], (rank - ahead) % n)
        handle.wait()


@wrong("02.my_all_gather", "rank 0 of 2 sends 32 bytes")
def goes_around_twice(comm, chunks):
    gather(comm, chunks)
    gather(comm, chunks)


@wrong("02.my_all_gather", "rank 0 returns before its send is over")
def forgets_the_handle(comm, chunks):
    n, rank = comm.size, comm.rank
    for step in range(n - 1):
        comm.isend(chunks[(rank - step) % n], (rank + 1) % n)
        comm.recv(chunks[(rank - step - 1) % n], (rank - 1) % n)


# ---- my_all_reduce(comm, x)


@wrong("02.my_all_reduce", "for an x of 7 elements, a tensor that differs in")
def forgets_the_rest(comm, x):
    chunks = x[: x.numel() // comm.size * comm.size].chunk(comm.size)
    scatter(comm, chunks, comm.size - 1)
    gather(comm, chunks)


@wrong("02.my_all_reduce", "rank 0 ends with the numbers of rank 0 in chunk 1")
def works_on_a_copy(comm, x):
    chunks = [chunk.clone() for chunk in x.tensor_split(comm.size)]
    scatter(comm, chunks, comm.size - 1)
    gather(comm, chunks)


@wrong("02.my_all_reduce", "rank 0 ends with the numbers of rank 0 in chunk 1")
def scatters_only(comm, x):
    scatter(comm, x.tensor_split(comm.size), comm.size - 1)


@wrong("02.my_all_reduce", "4 ranks send 576 bytes together for an x of 48 bytes")
def everything_around_the_ring(comm, x):
    passing, total = x.clone(), x.clone()
    every = {comm.rank: x.clone()}
    for step in range(1, comm.size):
        arrived = torch.empty_like(x)
        pass_on(comm, passing, arrived)
        passing = arrived
        every[(comm.rank - step) % comm.size] = arrived
    total = sum(every[rank] for rank in range(comm.size))
    x.copy_(total)


@wrong("02.my_all_reduce", "sums that differ in the last bits")
def keeps_a_better_sum_of_its_own(comm, x):
    chunks = x.tensor_split(comm.size)
    scatter(comm, chunks, comm.size - 1)
    gather(comm, chunks)
    if x.is_floating_point():
        chunks[comm.rank].mul_(1 + 2e-7)


@wrong("02.my_all_reduce", "on 2 ranks it takes 3 steps, but 2 are enough")
def waits_between_the_halves(comm, x):
    chunks, token = x.tensor_split(comm.size), x[:0]
    scatter(comm, chunks, comm.size - 1)
    if comm.rank > 0:  # "all must be ready first"
        comm.recv(token.clone(), comm.rank - 1)
    if comm.rank < comm.size - 1:
        comm.send(token, comm.rank + 1)
    gather(comm, chunks)


@wrong(
    "02.my_all_reduce",
    "the numbers of ranks 0 and 1, those of rank 0 2 times",
)
def adds_in_both_halves(comm, x):
    chunks = x.tensor_split(comm.size)
    scatter(comm, chunks, 2 * (comm.size - 1))


@wrong("02.my_all_reduce", "Are the chunks views of x itself, and n of them that make up all of x?")
def rebinds_x(comm, x):
    chunks = [chunk.clone() for chunk in x.tensor_split(comm.size)]
    scatter(comm, chunks, comm.size - 1)
    gather(comm, chunks)
    x = torch.cat(chunks)


@right("02.my_all_reduce")
def adds_to_the_items_of_a_list_of_views(comm, x):
    chunks = list(x.tensor_split(comm.size))
    adds_to_the_item_of_the_list(comm, chunks)
    gather(comm, chunks)


# ---- my_tree(comm, x, root)


@wrong("02.my_tree", "now holds, with root 2, a tensor that differs in 5 of 5 elements")
def knows_root_0_only(comm, x, root):
    reach = 1
    while reach < comm.size:
        if comm.rank < reach and comm.rank + reach < comm.size:
            comm.send(x, comm.rank + reach)
        elif reach <= comm.rank < 2 * reach:
            comm.recv(x, comm.rank - reach)
        reach *= 2


@wrong("02.my_tree", "on 4 ranks it takes 3 steps, but 2 are enough")
def one_by_one(comm, x, root):
    if comm.rank != root:
        comm.recv(x, root)
    else:
        for other in range(comm.size):
            if other != root:
                comm.send(x, other)


@wrong("02.my_tree", "on 4 ranks it takes 3 steps, but 2 are enough")
def as_a_chain(comm, x, root):
    position = (comm.rank - root) % comm.size
    if position > 0:
        comm.recv(x, (comm.rank - 1) % comm.size)
    if position < comm.size - 1:
        comm.send(x, (comm.rank + 1) % comm.size)


@wrong("02.my_tree", "on 7 ranks it takes 4 steps, but 3 are enough")
def as_a_heap(comm, x, root):
    position = (comm.rank - root) % comm.size
    if position > 0:
        comm.recv(x, ((position - 1) // 2 + root) % comm.size)
    for below in (2 * position + 1, 2 * position + 2):
        if below < comm.size:
            comm.send(x, (below + root) % comm.size)


@wrong("02.my_tree", "rank 0 calls broadcast")
def takes_the_library(comm, x, root):
    comm.broadcast(x, root, algorithm="tree")


@wrong("02.my_tree", "2 ranks send 40 bytes together")
def sends_it_twice(comm, x, root):
    as_a_chain(comm, x, root)
    as_a_chain(comm, x, root)


# ---- crossover_bytes(n, alpha_s, beta_s_per_byte)


@wrong("02.crossover_bytes", "for n=4, alpha_s=0.005, beta_s_per_byte=8e-08: 62500.0, but 50000.0")
def takes_the_rings_bytes_as_2s_too_few(n, alpha_s, beta_s_per_byte):
    return (n - 1 - log2(n)) * alpha_s / ((log2(n) - 1) * beta_s_per_byte)


@wrong("02.crossover_bytes", "for n=6")
def forgets_to_round_the_logarithm(n, alpha_s, beta_s_per_byte):
    return (n - 1 - log2(n)) * alpha_s / ((log2(n) - (n - 1) / n) * beta_s_per_byte)


@wrong("02.crossover_bytes", "you find -50000 bytes, but a size is above 0")
def has_the_sign_wrong(n, alpha_s, beta_s_per_byte):
    steps = ceil(log2(n))
    return (steps - n + 1) * alpha_s / ((steps - (n - 1) / n) * beta_s_per_byte)


@wrong("02.crossover_bytes", "says for n=4, alpha_s=0.005, beta_s_per_byte=8e-08: None")
def returns_nothing(n, alpha_s, beta_s_per_byte):
    pass


@right("02.crossover_bytes")
def rounds_to_a_whole_byte(n, alpha_s, beta_s_per_byte):
    steps = ceil(log2(n))
    more_bytes = steps - (n - 1) / n
    return int((n - 1 - steps) * alpha_s / (more_bytes * beta_s_per_byte))


# ---- my_best_broadcast(comm, x)


@wrong("02.my_best_broadcast", "it takes 210 µs in the model, no less than the tree's 210 µs")
def the_tree_again(comm, x):
    reach = 1
    while reach < comm.size:
        if comm.rank < reach and comm.rank + reach < comm.size:
            comm.send(x, comm.rank + reach)
        elif reach <= comm.rank < 2 * reach:
            comm.recv(x, comm.rank - reach)
        reach *= 2


@wrong("02.my_best_broadcast", "it takes 350 µs in the model")
def a_chain_of_one_piece(comm, x):
    if comm.rank > 0:
        comm.recv(x, comm.rank - 1)
    if comm.rank < comm.size - 1:
        comm.send(x, comm.rank + 1)


@wrong("02.my_best_broadcast", "You cut x. Now draw it: who has a piece and does not send?")
def cuts_but_sends_all_from_rank_0(comm, x):
    for piece in x.tensor_split(6):
        for other in range(1, comm.size):
            if comm.rank == 0:
                comm.send(piece, other)
            elif comm.rank == other:
                comm.recv(piece, 0)


@wrong("02.my_best_broadcast", "of 6 now holds a tensor that differs in")
def loses_the_last_piece(comm, x):
    handles = []
    for piece in x.tensor_split(6)[:5]:
        if comm.rank > 0:
            comm.recv(piece, comm.rank - 1)
        if comm.rank < comm.size - 1:
            handles.append(comm.isend(piece, comm.rank + 1))
    for handle in handles:
        handle.wait()


@wrong("02.my_best_broadcast", "rank 0 calls broadcast")
def asks_the_library(comm, x):
    comm.broadcast(x, algorithm="chain")
