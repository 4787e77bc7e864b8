import torch

from answers import wrong

# ---- bandwidths(op, nbytes, ranks, seconds)


@wrong("03.bandwidths", "busbw of all_gather on 2 ranks is 0.24 GB/s, but 0.12 is right")
def knows_one_bandwidth(op, nbytes, ranks, seconds):
    algbw = nbytes / seconds / 1e9
    return algbw, algbw


@wrong("03.bandwidths", "busbw of broadcast on 2 ranks is 0.12 GB/s, but 0.24 is right")
def takes_a_broadcast_for_a_gather(op, nbytes, ranks, seconds):
    algbw = nbytes / seconds / 1e9
    factor = (ranks - 1) / ranks
    return algbw, algbw * factor * (2 if op == "all_reduce" else 1)


@wrong("03.bandwidths", "busbw of all_reduce on 3 ranks is 0.24 GB/s, but 0.32 is right")
def knows_two_ranks_only(op, nbytes, ranks, seconds):
    algbw = nbytes / seconds / 1e9
    return algbw, algbw * (0.5 if op in ("all_gather", "reduce_scatter") else 1)


@wrong("03.bandwidths", "GB/s are 1e9 bytes per second")
def counts_bits(op, nbytes, ranks, seconds):
    return 8 * nbytes / seconds / 1e9, 0.0


@wrong("03.bandwidths", "expected: two numbers: (algbw, busbw)")
def returns_one_number(op, nbytes, ranks, seconds):
    return nbytes / seconds / 1e9


# ---- best_order(node_of)


@wrong("03.best_order", "your ring [0, 1, 2, 3] sends 288 bytes between nodes, but 144 are enough")
def leaves_them_as_they_are(node_of):
    return list(range(len(node_of)))


@wrong("03.best_order", "expected: a list of the 4 ranks, each once")
def returns_the_nodes(node_of):
    return sorted(node_of)


@wrong("03.best_order", "for [0, 0, 1, 1] your ring [0, 2, 1, 3] sends")
def knows_the_example_only(node_of):
    return [0, 2, 1, 3][: len(node_of)]


@wrong("03.best_order", "with 12 ranks on 3 nodes, your order is")
def knows_two_nodes_only(node_of):
    first = [rank for rank, node in enumerate(node_of) if node == node_of[0]]
    return first + [rank for rank in range(len(node_of)) if rank not in first]


# ---- my_hierarchical(inside, between, x)


@wrong("03.my_hierarchical", "on 2 nodes of 2, rank 0 sends 64 bytes over `between`, but 32 are")
def sends_all_between(inside, between, x):
    inside.all_reduce(x)
    between.all_reduce(x)


@wrong("03.my_hierarchical", "rank 0 (2 nodes of 2) now holds")
def forgets_the_other_nodes(inside, between, x):
    inside.all_reduce(x)


@wrong("03.my_hierarchical", "rank 0 (2 nodes of 2) now holds")
def forgets_to_share_the_sum(inside, between, x):
    part = x.new_empty(x.numel() // inside.size)
    inside.reduce_scatter_tensor(part, x)
    between.all_reduce(part)
    x[: part.numel()] = part


@wrong("03.my_hierarchical", "over `inside`, but 64 are enough")
def gathers_inside_by_all_reduce(inside, between, x):
    inside.all_reduce(x)
    n = x.numel() // inside.size
    part = x[inside.rank * n : (inside.rank + 1) * n].clone()
    between.all_reduce(part)
    inside.all_gather_into_tensor(x, part)


@wrong("03.my_hierarchical", "x itself must change")
def returns_a_new_tensor(inside, between, x):
    part = x.new_empty(x.numel() // inside.size)
    inside.reduce_scatter_tensor(part, x)
    between.all_reduce(part)
    out = torch.empty_like(x)
    inside.all_gather_into_tensor(out, part)
    return out


@wrong("03.my_hierarchical", "x itself must change")
def gives_the_name_to_a_new_tensor(inside, between, x):
    part = x.new_empty(x.numel() // inside.size)
    inside.reduce_scatter_tensor(part, x)
    between.all_reduce(part)
    x = torch.empty_like(x)
    inside.all_gather_into_tensor(x, part)


# ---- read_log(log)


@wrong("03.read_log", "your function raised AttributeError")
def looks_for_the_channels_in_the_wrong_place(log):
    return log.channels, {"P2P"}, set()


@wrong("03.read_log", "between is {'P2P'}, but set() is right")
def mixes_inside_and_between(log):
    kinds = {one.kind for one in log.main.connections}
    return log.main.channels, kinds, kinds


@wrong("03.read_log", "channels is 8")
def counts_ranks_for_channels(log):
    group = log.main
    same = {c.kind for c in group.connections if group.same_node(c.source, c.target)}
    other = {c.kind for c in group.connections if not group.same_node(c.source, c.target)}
    return group.size if group.size == 8 else group.channels, same, other


@wrong("03.read_log", "between is")
def takes_the_whole_transport(log):
    group = log.main
    same = {c.kind for c in group.connections if group.same_node(c.source, c.target)}
    other = {c.transport for c in group.connections if not group.same_node(c.source, c.target)}
    return group.channels, same, other


@wrong("03.read_log", "expected: three things")
def returns_the_channels_alone(log):
    return log.main.channels


# ---- rings(wires)


@wrong("03.rings", "goes from GPU 3 to 4, which no NVLink joins")
def leaves_the_gpus_in_order(wires):
    return [[0, 1, 2, 3, 4, 5, 6, 7]]


@wrong("03.rings", "goes from GPU 7 to 0, which no NVLink joins")
def forgets_that_a_ring_closes(wires):
    return [[0, 1, 3, 2, 6, 5, 4, 7]]


@wrong("03.rings", "Also a single ring stands in a list")
def returns_a_single_ring(wires):
    return [0, 3, 2, 1, 5, 6, 7, 4]


@wrong("03.rings", "each a list of the GPUs 0 to 7, each once")
def leaves_a_gpu_out(wires):
    return [[0, 3, 2, 1, 5, 6, 7]]
