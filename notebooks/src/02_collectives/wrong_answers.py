import torch

from answers import Solution, wrong

from .scenarios import pass_on

# ---- my_reduce_scatter(comm, chunks)

Solution("02.my_reduce_scatter").slips("""
ends_one_chunk_further: of 2 ranks, rank 0 ends with the numbers of rank 0 in chunk 0
    comm.rank - step) -> comm.rank - step + 1)
    comm.rank - step - 1) -> comm.rank - step)
one_step_too_few: now holds in its own chunk a tensor that differs in
    range(1, n) -> range(1, n - 1)
sends_every_chunk_twice: rank 0 of 2 sends 32 bytes
    pass_on(comm, give, incoming) ->
        pass_on(comm, give, incoming)
        pass_on(comm, give, incoming)
receives_over_its_own: rank 0 ends with the numbers of rank 1 in chunk 0
    pass_on(comm, give, incoming) -> pass_on(comm, give, take)
    take += incoming -> pass
all_send_first: All of them wait in a send: one must do the other first
    pass_on(comm, give, incoming) ->
        comm.send(give, (comm.rank + 1) % n)
        comm.recv(incoming, (comm.rank - 1) % n)
sums_into_other_tensors: on rank 0 chunk 0 is another tensor than the one you were given
    take += incoming -> chunks[(comm.rank - step - 1) % n] = take + incoming
adds_to_the_item_of_the_list
    take += incoming -> chunks[(comm.rank - step - 1) % n] += incoming
copies_the_sum_into_the_chunk
    take += incoming -> take.copy_(take + incoming)
takes_the_ready_one: rank 0 calls all_reduce
    return [comm.all_reduce(chunk) for chunk in chunks]
sends_each_its_chunk_directly: rank 0 of 3 sends to rank 2
    incoming = torch.empty_like(take)
    pass_on(comm, give, incoming)
    take += incoming ->
        incoming = torch.empty_like(chunks[comm.rank])
        handle = comm.isend(chunks[(comm.rank + step) % n], (comm.rank + step) % n)
        comm.recv(incoming, (comm.rank - step) % n)
        handle.wait()
        chunks[comm.rank] += incoming
one_after_the_other: on 2 ranks it takes 2 steps, but 1 is enough
    pass_on(comm, give, incoming) ->
        if comm.rank == 0:
            comm.send(give, (comm.rank + 1) % n)
            comm.recv(incoming, (comm.rank - 1) % n)
        else:
            comm.recv(incoming, (comm.rank - 1) % n)
            comm.send(give, (comm.rank + 1) % n)
""")


# ---- my_all_gather(comm, chunks)

Solution("02.my_all_gather").slips("""
puts_what_arrives_into_the_list: on rank 0 chunk 1 is another tensor than the one you were given
    pass_on(comm, give, take) ->
        take = chunks[(comm.rank - step - 1) % n] = torch.empty_like(take)
        pass_on(comm, give, take)
adds_what_arrives: and overwrite what was there
    pass_on(comm, give, take) ->
        incoming = torch.empty_like(take)
        pass_on(comm, give, incoming)
        take += incoming
always_sends_its_own: rank 0 ends with the numbers of rank 2 for chunk 2 in chunk 1
    chunks[(comm.rank - step) % n] -> chunks[comm.rank]
never_receives_into_the_chunks: of 2 ranks, rank 0 ends with nothing in chunk 1
    n = comm.size -> n, chunks = comm.size, [chunk.clone() for chunk in chunks]
goes_around_twice: rank 0 of 2 sends 32 bytes
    range(n - 1) -> range(2 * (n - 1))
forgets_the_handle: rank 0 returns before its send has completed
    pass_on(comm, give, take) ->
        comm.isend(give, (comm.rank + 1) % n)
        comm.recv(take, (comm.rank - 1) % n)
sends_its_own_to_all: sends to rank 2
    pass_on(comm, give, take) ->
        handle = comm.isend(chunks[comm.rank], (comm.rank + step + 1) % n)
        comm.recv(take, (comm.rank - step - 1) % n)
        handle.wait()
""")


# ---- my_all_reduce(comm, x)

Solution("02.my_all_reduce").slips("""
forgets_the_rest: for an x of 7 elements, a tensor that differs in
    x.tensor_split(comm.size) -> x[: x.numel() // comm.size * comm.size].chunk(comm.size)
scatters_only: rank 0 ends with the numbers of rank 0 in chunk 1
    my_all_gather(comm, chunks) -> pass
keeps_a_better_sum_of_its_own: sums that differ in the last bits
    my_all_gather(comm, chunks) ->
        my_all_gather(comm, chunks)
        if x.is_floating_point():
            chunks[comm.rank].mul_(1 + 2e-7)
waits_between_the_halves: on 2 ranks it takes 3 steps, but 2 are enough
    my_all_gather(comm, chunks) ->
        if comm.rank > 0:  # "all must be ready first"
            comm.recv(x[:0].clone(), comm.rank - 1)
        if comm.rank < comm.size - 1:
            comm.send(x[:0], comm.rank + 1)
        my_all_gather(comm, chunks)
rebinds_x: Are the chunks views of x itself, and n of them that make up all of x?
    list(x.tensor_split(comm.size)) -> [chunk.clone() for chunk in x.tensor_split(comm.size)]
    my_all_gather(comm, chunks) ->
        my_all_gather(comm, chunks)
        x = torch.cat(chunks)
""")


@wrong("02.my_all_reduce", "4 ranks send 576 bytes together for an x of 48 bytes")
def everything_around_the_ring(comm, x):
    passing = x.clone()
    every = {comm.rank: x.clone()}
    for step in range(1, comm.size):
        arrived = torch.empty_like(x)
        pass_on(comm, passing, arrived)
        passing = arrived
        every[(comm.rank - step) % comm.size] = arrived
    x.copy_(sum(every[rank] for rank in range(comm.size)))


@wrong("02.my_all_reduce", "the numbers of ranks 0 and 1, those of rank 0 2 times")
def adds_in_both_halves(comm, x):
    n, chunks = comm.size, x.tensor_split(comm.size)
    for step in range(1, 2 * n - 1):
        take = chunks[(comm.rank - step - 1) % n]
        incoming = torch.empty_like(take)
        pass_on(comm, chunks[(comm.rank - step) % n], incoming)
        take += incoming


# ---- my_tree(comm, x, root)

Solution("02.my_tree").slips("""
knows_root_0_only: now holds, with root 2, a tensor that differs in 5 of 5 elements
    (comm.rank - root) % comm.size -> comm.rank
takes_the_library: rank 0 calls broadcast
    return comm.broadcast(x, root, algorithm="tree")
""")


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


@wrong("02.my_tree", "2 ranks send 40 bytes together")
def sends_it_twice(comm, x, root):
    as_a_chain(comm, x, root)
    as_a_chain(comm, x, root)


# ---- crossover_bytes(n, alpha_s, beta_s_per_byte)

Solution("02.crossover_bytes").slips("""
takes_a_2_for_the_ring: for n=4, alpha_s=0.005, beta_s_per_byte=8e-08: 62500.0, but 50000.0
    tree_steps - 2 * (n - 1) / n -> tree_steps - 2
forgets_to_round_the_logarithm: for n=6
    ceil(log2(n)) -> log2(n)
has_the_sign_wrong: you find -50000 bytes, but a size is above 0
    (ring_steps - tree_steps) -> (tree_steps - ring_steps)
returns_nothing: says for n=4, alpha_s=0.005, beta_s_per_byte=8e-08: None
    return None
rounds_to_a_whole_byte
    (ring_steps - tree_steps) * alpha_s / (more_bytes * beta_s_per_byte) ->
        int((ring_steps - tree_steps) * alpha_s / (more_bytes * beta_s_per_byte))
""")

# ---- my_best_broadcast(comm, x)

Solution("02.my_best_broadcast").slips("""
a_chain_of_one_piece: it takes 350 µs in the model
    x.tensor_split(6) -> [x]
loses_the_last_piece: of 6 now holds a tensor that differs in
    x.tensor_split(6) -> x.tensor_split(6)[:5]
asks_the_library: rank 0 calls broadcast
    return comm.broadcast(x, algorithm="chain")
""")


@wrong("02.my_best_broadcast", "it takes 210 µs in the model, no less than the tree's 210 µs")
def the_tree_again(comm, x):
    reach = 1
    while reach < comm.size:
        if comm.rank < reach and comm.rank + reach < comm.size:
            comm.send(x, comm.rank + reach)
        elif reach <= comm.rank < 2 * reach:
            comm.recv(x, comm.rank - reach)
        reach *= 2


@wrong("02.my_best_broadcast", "You cut x. Now draw it: who has a piece and does not send?")
def cuts_but_sends_all_from_rank_0(comm, x):
    for piece in x.tensor_split(6):
        for other in range(1, comm.size):
            if comm.rank == 0:
                comm.send(piece, other)
            elif comm.rank == other:
                comm.recv(piece, 0)
