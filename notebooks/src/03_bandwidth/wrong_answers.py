from answers import Solution, wrong

# ---- bandwidths(op, nbytes, ranks, seconds)

Solution("03.bandwidths").slips("""
returns_algbw_twice: busbw of all_gather on 2 ranks should be 0.12 GB/s, not 0.24
    algbw * factors[op] -> algbw
takes_a_broadcast_for_a_gather: busbw of broadcast on 2 ranks should be 0.24 GB/s, not 0.12
    "broadcast": 1 -> "broadcast": (ranks - 1) / ranks
hardcodes_two_ranks: busbw of all_reduce on 3 ranks should be 0.32 GB/s, not 0.24
    2 * (ranks - 1) / ranks -> 1
counts_bits: 1 GB/s is 1e9 bytes per second
    algbw = nbytes -> algbw = 8 * nbytes
returns_one_number: expected: two numbers: (algbw, busbw)
    algbw, algbw * factors[op] -> algbw
""")

# ---- best_order(node_of)

Solution("03.best_order").slips("""
keeps_the_order_of_ranks: your ring [0, 1, 2, 3] sends 288 bytes between nodes, but 144 are enough
    return list(range(len(node_of)))
returns_the_nodes: expected: a list of the 4 ranks, each once
    return sorted(node_of)
hardcodes_the_example: for node_of=[0, 0, 1, 1], your ring [0, 2, 1, 3] sends
    return [0, 2, 1, 3][: len(node_of)]
separates_two_nodes_only: with 12 ranks on 3 nodes, your order is
    rank: node_of[rank] -> rank: node_of[rank] != node_of[0]
""")

# ---- my_hierarchical(inside, between, x)

Solution("03.my_hierarchical").slips("""
forgets_the_other_nodes: rank 0 (2 nodes of 2) now holds
    between.all_reduce(part) -> pass
forgets_to_share_the_sum: rank 0 (2 nodes of 2) now holds
    inside.all_gather_into_tensor(x, part) -> x[: part.numel()] = part
gathers_inside_by_all_reduce: over `inside`, but 64 are enough
    inside.reduce_scatter_tensor(part, x) ->
        inside.all_reduce(x)
        part = x.chunk(inside.size)[inside.rank].clone()
returns_a_new_tensor: write into x itself
    inside.all_gather_into_tensor(x, part) ->
        out = torch.empty_like(x)
        inside.all_gather_into_tensor(out, part)
        return out
rebinds_x: write into x itself
    inside.all_gather_into_tensor(x, part) ->
        x = torch.empty_like(x)
        inside.all_gather_into_tensor(x, part)
""")


@wrong("03.my_hierarchical", "on 2 nodes of 2, rank 0 sends 64 bytes over `between`, but 32 are")
def sends_all_between(inside, between, x):
    inside.all_reduce(x)
    between.all_reduce(x)


# ---- read_log(log)

Solution("03.read_log").slips("""
looks_for_the_channels_in_the_wrong_place: your function raised AttributeError
    group.channels -> log.channels
mixes_inside_and_between: between should be set(), not {'P2P'}
    {True: set(), False: set()} -> dict.fromkeys((True, False), set())
counts_ranks_as_channels: channels should be 4, not 8
    group.channels -> group.size if group.size == 8 else group.channels
takes_the_whole_transport: between should be {'NET/Socket'}, not
    one.kind -> one.kind if group.same_node(one.source, one.target) else one.transport
returns_the_channels_alone: expected: three values
    return log.main.channels
""")

# ---- rings(links)

Solution("03.rings").slips("""
keeps_the_order_of_gpus: goes from GPU 3 to GPU 4, but no NVLink connects them
    return [[0, 1, 2, 3, 4, 5, 6, 7]]
forgets_that_a_ring_closes: goes from GPU 7 to GPU 0, but no NVLink connects them
    return [[0, 1, 3, 2, 6, 5, 4, 7]]
returns_a_single_ring: Put even a single ring in a list
    return [0, 3, 2, 1, 5, 6, 7, 4]
skips_a_gpu: each a list of GPUs 0 to 7, each GPU once
    return [[0, 3, 2, 1, 5, 6, 7]]
""")
