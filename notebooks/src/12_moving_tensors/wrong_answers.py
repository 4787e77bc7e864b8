from answers import Solution, right

# ---- bring_half(bus, x, bus_rate, here_rate, there_rate)

Solution("12.bring_half").slips("""
always_casts_before: you cast before the copy
    if before < after: -> if True:
always_casts_after: you cast after the copy
    if before < after: -> if False:
looks_only_at_the_bus: you cast after the copy
    before < after -> bus_rate < here_rate / 3
does_not_wait: bus.copy(...) only starts the copy
    torch.empty_like(x) -> torch.zeros_like(x)
    .wait() ->
skips_the_copy: 0 bytes crossed the bus
    return x.half()
stays_in_fp32: Return fp16
    x = x.half() -> pass
    return there.half() -> return there
""")

# ---- prefetched(load, n, ahead)

Solution("12.prefetched").slips("""
yields_the_arrivals: you yield blocks
    .wait() ->
drops_the_last: you yield blocks
    for k in range(n): -> for k in range(n - ahead):
loads_when_needed: 1 loads have started when block 0 is used
    coming = [load(k) for k in range(min(ahead, n))] -> ahead, coming = 0, []
loads_everything_first: blocks are loaded or loading at a time
    range(min(ahead, n)) -> range(n)
    if k + ahead < n: -> if False:
loads_before_a_block_is_freed: 3 blocks are loaded or loading at a time
    def prefetched(load, n, ahead): ->
        def prefetched(load, n, ahead):
            ahead += 1
stops_prefetching_after_the_first: loads have started when block
    min(ahead, n) -> min(ahead + 1, n)
    if k + ahead < n:
        coming.append(load(k + ahead)) ->
        if not coming:
            coming.append(load(k))
""")


@right("12.prefetched")
def loads_after_each_yield(load, n, ahead):
    coming = [load(k) for k in range(min(ahead + 1, n))]
    for k in range(n):
        yield coming[k].wait()
        if k + ahead + 1 < n:
            coming.append(load(k + ahead + 1))


# ---- double_buffered(bus, blocks, compute, x)

Solution("12.double_buffered").slips("""
no_overlap: block 0 computes before the load of block 1 starts
    if k + 1 < len(blocks):
        part, coming = load(k + 1)
    arrival.wait()
    x = compute(k, mine, x) ->
        arrival.wait()
        x = compute(k, mine, x)
        if k + 1 < len(blocks):
            part, coming = load(k + 1)
has_one_buffer: computes with wrong or overwritten weights
    buffers[k % 2] -> buffers[0]
does_not_wait_for_a_load: block 0 computes before you wait for its load
    arrival.wait() -> pass
has_three_buffers: in 3 buffers
    [torch.empty(largest), torch.empty(largest)] -> [torch.empty(largest) for _ in range(3)]
    k % 2 -> k % 3
makes_a_buffer_for_each_block: you hold
    [torch.empty(largest), torch.empty(largest)] -> [torch.empty_like(block) for block in blocks]
    k % 2 -> k
has_buffers_of_the_first_block: your function raised
    max(block.numel() for block in blocks) -> blocks[0].numel()
returns_nothing: you returned None
    return x -> pass
""")

# ---- plan(model)

Solution("12.plan").slips("""
keeps_nothing: ms of streaming all blocks
    return (set(), 1)
keeps_everything: your plan needs
    return (set(range(len(model.nbytes))), 1)
forgets_the_buffers: your plan needs
    model.held_bytes(one, ahead) -> sum(model.nbytes[k] for k in one)
loads_nothing_ahead: ahead is 0
    return ({0}, 0)
float_indices: keep contains 3.0
    return ({3.0}, 1)
keeps_an_unknown_block: keep contains 99
    return ({0, 99}, 1)
returns_only_keep: plan returned {0, 1}
    return {0, 1}
""")
