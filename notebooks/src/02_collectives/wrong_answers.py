import torch

from answers import Solution, wrong

from .scenarios import pass_on

# ---- my_reduce_scatter(comm, chunks)

Solution("02.my_reduce_scatter").slips("""
ends_one_chunk_further: with 2 ranks, rank 0 ends with the data of rank 0 in chunk 0
    comm.rank - step) -> comm.rank - step + 1)
    comm.rank - step - 1) -> comm.rank - step)
one_step_too_few: now holds in its own chunk a tensor that differs in
    range(1, n) -> range(1, n - 1)
sends_every_chunk_twice: rank 0 of 2 sends 32 bytes
    pass_on(comm, give, incoming) ->
        pass_on(comm, give, incoming)
        pass_on(comm, give, incoming)
overwrites_its_own_data: rank 0 ends with the data of rank 1 in chunk 0
    pass_on(comm, give, incoming) -> pass_on(comm, give, take)
    take += incoming -> pass
all_send_first: All of them wait in a send: one must start with the other call
    pass_on(comm, give, incoming) ->
        comm.send(give, (comm.rank + 1) % n)
        comm.recv(incoming, (comm.rank - 1) % n)
sums_into_other_tensors: rank 0 replaced chunks[0] with a new tensor
    take += incoming -> chunks[(comm.rank - step - 1) % n] = take + incoming
adds_to_the_item_of_the_list
    take += incoming -> chunks[(comm.rank - step - 1) % n] += incoming
copies_the_sum_into_the_chunk
    take += incoming -> take.copy_(take + incoming)
calls_the_library: rank 0 calls all_reduce
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
ranks_take_turns: on 2 ranks your function takes 2 steps, but 1 is enough
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
replaces_the_chunks: rank 0 replaced chunks[1] with a new tensor
    pass_on(comm, give, take) ->
        take = chunks[(comm.rank - step - 1) % n] = torch.empty_like(take)
        pass_on(comm, give, take)
adds_the_received_chunks: and overwrite the old values
    pass_on(comm, give, take) ->
        incoming = torch.empty_like(take)
        pass_on(comm, give, incoming)
        take += incoming
always_sends_its_own: rank 0 ends with the data of rank 2 for chunk 2 in chunk 1
    chunks[(comm.rank - step) % n] -> chunks[comm.rank]
never_receives_into_the_chunks: with 2 ranks, rank 0 ends with nothing in chunk 1
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
drops_the_remainder: for an x of 7 elements, a tensor that differs in
    x.tensor_split(comm.size) -> x[: x.numel() // comm.size * comm.size].chunk(comm.size)
scatters_only: rank 0 ends with the data of rank 0 in chunk 1
    my_all_gather(comm, chunks) -> pass
keeps_a_slightly_different_sum: the sums on ranks 0 and 1 differ in the last bits
    my_all_gather(comm, chunks) ->
        my_all_gather(comm, chunks)
        if x.is_floating_point():
            chunks[comm.rank].mul_(1 + 2e-7)
waits_between_the_halves: on 2 ranks your function takes 3 steps, but 2 are enough
    my_all_gather(comm, chunks) ->
        if comm.rank > 0:  # "all must be ready first"
            comm.recv(x[:0].clone(), comm.rank - 1)
        if comm.rank < comm.size - 1:
            comm.send(x[:0], comm.rank + 1)
        my_all_gather(comm, chunks)
rebinds_x: Are the chunks n views of x that cover all of x?
    list(x.tensor_split(comm.size)) -> [chunk.clone() for chunk in x.tensor_split(comm.size)]
    my_all_gather(comm, chunks) ->
        my_all_gather(comm, chunks)
        x = torch.cat(chunks)
""")


@wrong("02.my_all_reduce", "4 ranks send 576 bytes in total for an x of 48 bytes")
def everything_around_the_ring(comm, x):
    passing = x.clone()
    received = {comm.rank: x.clone()}
    for step in range(1, comm.size):
        arrived = torch.empty_like(x)
        pass_on(comm, passing, arrived)
        passing = arrived
        received[(comm.rank - step) % comm.size] = arrived
    x.copy_(sum(received[rank] for rank in range(comm.size)))


@wrong("02.my_all_reduce", "the data of ranks 0 and 1, with rank 0's added 2 times")
def adds_in_both_halves(comm, x):
    n, chunks = comm.size, x.tensor_split(comm.size)
    for step in range(1, 2 * n - 1):
        take = chunks[(comm.rank - step - 1) % n]
        incoming = torch.empty_like(take)
        pass_on(comm, chunks[(comm.rank - step) % n], incoming)
        take += incoming


# ---- my_tree(comm, x, root)

Solution("02.my_tree").slips("""
hardcodes_root_0: now holds, with root 2, a tensor that differs in 5 of 5 elements
    (comm.rank - root) % comm.size -> comm.rank
calls_the_library: rank 0 calls broadcast
    return comm.broadcast(x, root, algorithm="tree")
""")


@wrong("02.my_tree", "on 4 ranks your function takes 3 steps, but 2 are enough")
def one_by_one(comm, x, root):
    if comm.rank != root:
        comm.recv(x, root)
    else:
        for other in range(comm.size):
            if other != root:
                comm.send(x, other)


@wrong("02.my_tree", "on 4 ranks your function takes 3 steps, but 2 are enough")
def as_a_chain(comm, x, root):
    position = (comm.rank - root) % comm.size
    if position > 0:
        comm.recv(x, (comm.rank - 1) % comm.size)
    if position < comm.size - 1:
        comm.send(x, (comm.rank + 1) % comm.size)


@wrong("02.my_tree", "on 7 ranks your function takes 4 steps, but 3 are enough")
def as_a_heap(comm, x, root):
    position = (comm.rank - root) % comm.size
    if position > 0:
        comm.recv(x, ((position - 1) // 2 + root) % comm.size)
    for below in (2 * position + 1, 2 * position + 2):
        if below < comm.size:
            comm.send(x, (below + root) % comm.size)


@wrong("02.my_tree", "2 ranks send 40 bytes in total")
def sends_it_twice(comm, x, root):
    as_a_chain(comm, x, root)
    as_a_chain(comm, x, root)


# ---- crossover_bytes(n, alpha_s, beta_s_per_byte)

Solution("02.crossover_bytes").slips("""
takes_a_2_for_the_ring: for n=4, alpha_s=0.005, beta_s_per_byte=8e-08: 62500.0; expected 50000.0
    tree_steps - 2 * (n - 1) / n -> tree_steps - 2
forgets_to_round_the_logarithm: for n=6
    ceil(log2(n)) -> log2(n)
has_the_sign_wrong: your crossover is -50000 bytes, but a size must be positive
    (ring_steps - tree_steps) -> (tree_steps - ring_steps)
returns_nothing: returned for n=4, alpha_s=0.005, beta_s_per_byte=8e-08: None
    return None
rounds_to_a_whole_byte
    (ring_steps - tree_steps) * alpha_s / (more_bytes * beta_s_per_byte) ->
        int((ring_steps - tree_steps) * alpha_s / (more_bytes * beta_s_per_byte))
""")

# ---- my_best_broadcast(comm, x)

Solution("02.my_best_broadcast").slips("""
a_chain_with_one_chunk: your broadcast takes 350 µs in the model
    x.tensor_split(6) -> [x]
drops_the_last_chunk: of 6 now holds a tensor that differs in
    x.tensor_split(6) -> x.tensor_split(6)[:5]
calls_the_library_chain: rank 0 calls broadcast
    return comm.broadcast(x, algorithm="chain")
""")


@wrong("02.my_best_broadcast", "takes 210 µs in the model, no less than the tree's 210 µs")
def the_tree_again(comm, x):
    reach = 1
    while reach < comm.size:
        if comm.rank < reach and comm.rank + reach < comm.size:
            comm.send(x, comm.rank + reach)
        elif reach <= comm.rank < 2 * reach:
            comm.recv(x, comm.rank - reach)
        reach *= 2


@wrong("02.my_best_broadcast", "Now draw it: which rank has a chunk and does not send it?")
def splits_but_sends_all_from_rank_0(comm, x):
    for chunk in x.tensor_split(6):
        for other in range(1, comm.size):
            if comm.rank == 0:
                comm.send(chunk, other)
            elif comm.rank == other:
                comm.recv(chunk, 0)
