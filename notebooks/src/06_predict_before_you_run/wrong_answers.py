from answers import Solution, right

# ---- ring_s(nbytes, n, latency_s, bytes_per_s)

Solution("06.ring_s").slips("""
one_latency: Each of the messages, one after another, adds its latency
    return latency_s + 2 * (n - 1) / n * nbytes / bytes_per_s
sends_everything_in_each_step: How large is the chunk sent in one step?
    nbytes / n / -> nbytes /
half_a_ring: How many messages follow one another, and how long does each take?
    2 * (n - 1) -> (n - 1)
sends_with_a_single_rank: of 4,000,000 bytes over 1 rank should take 0 s
    2 * (n - 1) -> max(2 * (n - 1), 1)
returns_nothing: ring_s returned None
    return None
in_two_halves
    2 * (n - 1) * (latency_s + nbytes / n / bytes_per_s) ->
        sum(latency_s + nbytes / n / bytes_per_s for _ in range(2 * (n - 1)))
""")

# ---- matmul_s(m, n, k, element_bytes, flops_per_s, bytes_per_s)

Solution("06.matmul_s").slips("""
no_overlap: Arithmetic and memory traffic overlap
    max(2 * m * n * k / flops_per_s, moved_bytes / bytes_per_s) ->
        2 * m * n * k / flops_per_s + moved_bytes / bytes_per_s
arithmetic_alone: the slower of the two sets the time
    return 2 * m * n * k / flops_per_s
multiplications_alone: How many multiplications and additions
    2 * m * n * k -> m * n * k
forgets_the_result: Which bytes are read, and which are written?
    + m * n) -> )
the_faster_one: the slower of the two sets the time
    max( -> min(
""")

# ---- volumes(width, depth, tokens, n, element_bytes)

Solution("06.volumes").slips("""
forgets_the_backward: tensor:
    around * 4 * depth -> around * 2 * depth
half_an_all_reduce: data:
    around * 12 -> around / 2 * 12
sends_to_the_right_only: pipeline:
    2 * x_bytes -> x_bytes
always_four_bytes: data:
    width**2 * element_bytes -> width**2 * 4
one_number: expected: three numbers: (data, tensor, pipeline)
    data, tensor, 2 * x_bytes -> data + tensor + 2 * x_bytes
""")

# ---- done_s(program)

Solution("06.done_s").slips("""
everything_in_sequence: the rank continues at once
    return sum(how for what, how in program if what != "wait")
never_waits: What does a wait wait for?
    return sum(how for what, how in program if what == "compute")
a_link_for_each_message: The rank must have issued it, and the link must be free
    max(now_s, free_s) -> now_s
time_goes_back: A wait for a finished message takes no time
    max(now_s, ends[how]) -> ends[how]
the_link_is_never_idle: The rank must have issued it, and the link must be free
    if ends else 0.0 -> if ends else now_s
    max(now_s, free_s) -> free_s
""")

# ---- step_in_closed_form_s(facts)

Solution("06.step_in_closed_form_s").slips("""
nothing_is_hidden: more than perfect overlap's 64
    return facts.forward_s + facts.backward_s + sum(facts.bucket_s) + facts.optimizer_s
forgets_the_optimizer: What is missing?
    return facts.forward_s + max(facts.backward_s, sum(facts.bucket_s))
counts_buckets_twice: What is counted twice?
    return facts.forward_s + facts.backward_s + facts.optimizer_s + 2 * sum(facts.bucket_s)
a_tensor: step_in_closed_form_s returned tensor(
    return torch.tensor(facts.forward_s)
""")


@right("06.step_in_closed_form_s")
def equal_buckets(facts):
    fill_s = facts.backward_s / len(facts.bucket_s)
    send_s = sum(facts.bucket_s) / len(facts.bucket_s)
    both_s = max(facts.backward_s + send_s, fill_s + sum(facts.bucket_s))
    return facts.forward_s + both_s + facts.optimizer_s


@right("06.step_in_closed_form_s")
def the_best_known(facts):
    """The head's matmuls are larger than the layers' and run faster; 0.8 is tuned by hand."""
    *early, _ = facts.bucket_bytes
    head, filled_bytes, free_s = 0.8 * facts.head_part, 0, 0.0
    for nbytes, seconds in zip(early, facts.bucket_s):
        filled_bytes += nbytes
        ready_s = facts.backward_s * (head + (1 - head) * filled_bytes / sum(early))
        free_s = max(free_s, ready_s) + seconds
    return facts.forward_s + max(free_s, facts.backward_s) + facts.bucket_s[-1] + facts.optimizer_s
