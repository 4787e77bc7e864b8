from dataclasses import replace
from math import ceil

from answers import right, wrong
from labkit import Layout

from .scenarios import JOBS

# ---- held_bytes(sizes, layout, global_batch, layer_bytes)


def held(
    sizes,
    layout,
    global_batch,
    layer_bytes,
    over_tp=True,
    over_pp=True,
    embedding=True,
    optimizer=12,
    zero=(1,),
    gradients_too=False,
    in_flight=None,
    layers_kept=None,
):
    """The solution, with one thing done otherwise."""
    p, v, m = layout.pp, layout.chunks, layout.microbatches(global_batch)
    layers = sizes.depth // p
    kept = 12 * sizes.width**2 * (layers if over_pp else sizes.depth)
    numbers = (kept + sizes.vocab * sizes.width * embedding) / (layout.tp if over_tp else 1)
    if in_flight is None:
        in_flight = min(m, p if v == 1 else p * (1 + (p - 1) / (p * v)))
    shards = layout.dp if layout.zero in zero else 1
    return {
        "parameters": 2 * numbers,
        "gradients": 2 * numbers / (shards if gradients_too else 1),
        "optimizer state": optimizer * numbers / shards,
        "activations": (layers if layers_kept is None else layers_kept) * in_flight * layer_bytes,
    }


@right("18.held_bytes")
def as_the_library_says(sizes, layout, global_batch, layer_bytes):
    from labkit.predict import interleaved

    count = layout.microbatches(global_batch)
    flight = interleaved(layout.pp, count, 1, 2, layout.chunks).peak_microbatches
    return held(sizes, layout, global_batch, layer_bytes, in_flight=flight)


@wrong("18.held_bytes", "Each matrix is cut over tp")
def forgets_tp(sizes, layout, global_batch, layer_bytes):
    return held(sizes, layout, global_batch, layer_bytes, over_tp=False)


@wrong("18.held_bytes", "12 w² numbers a layer and w v of the embedding")
def forgets_the_embedding(sizes, layout, global_batch, layer_bytes):
    return held(sizes, layout, global_batch, layer_bytes, embedding=False)


@wrong("18.held_bytes", "A stage has a part of the layers alone")
def all_layers_on_each_stage(sizes, layout, global_batch, layer_bytes):
    return held(sizes, layout, global_batch, layer_bytes, over_pp=False)


@wrong("18.held_bytes", "two moments and the master copy: 12 bytes")
def forgets_the_master_copy(sizes, layout, global_batch, layer_bytes):
    return held(sizes, layout, global_batch, layer_bytes, optimizer=8)


@wrong("18.held_bytes", "ZeRO-1 cuts this over the replicas")
def never_shards(sizes, layout, global_batch, layer_bytes):
    return held(sizes, layout, global_batch, layer_bytes, zero=())


@wrong("18.held_bytes", "Without ZeRO each replica holds all of it")
def always_shards(sizes, layout, global_batch, layer_bytes):
    return held(sizes, layout, global_batch, layer_bytes, zero=(0, 1))


@wrong("18.held_bytes", "ZeRO-1 does not cut them")
def shards_gradients(sizes, layout, global_batch, layer_bytes):
    return held(sizes, layout, global_batch, layer_bytes, gradients_too=True)


@wrong("18.held_bytes", "That is GPipe, which holds all m")
def gpipe(sizes, layout, global_batch, layer_bytes):
    m = layout.microbatches(global_batch)
    return held(sizes, layout, global_batch, layer_bytes, in_flight=m)


@wrong("18.held_bytes", "That is one micro-batch")
def one_microbatch(sizes, layout, global_batch, layer_bytes):
    return held(sizes, layout, global_batch, layer_bytes, in_flight=1)


@wrong("18.held_bytes", "how many more do chunks hold")
def p_always(sizes, layout, global_batch, layer_bytes):
    return held(sizes, layout, global_batch, layer_bytes, in_flight=layout.pp)


@wrong("18.held_bytes", "That is one layer")
def one_layer(sizes, layout, global_batch, layer_bytes):
    return held(sizes, layout, global_batch, layer_bytes, layers_kept=1)


@wrong("18.held_bytes", "it returned None")
def returns_nothing(sizes, layout, global_batch, layer_bytes):
    held(sizes, layout, global_batch, layer_bytes)


@wrong("18.held_bytes", "a dict of bytes: parameters, gradients")
def returns_the_sum(sizes, layout, global_batch, layer_bytes):
    return sum(held(sizes, layout, global_batch, layer_bytes).values())


# ---- step_s(layout, global_batch, forward_s, tensor_s)


def seconds(layout, global_batch, forward_s, tensor_s, m=None, bubble=None, back=None, again=None):
    forward = forward_s + tensor_s
    back = 2 * forward_s + tensor_s if back is None else back
    if layout.recompute == "full":
        back += forward if again is None else again
    m = layout.microbatches(global_batch) if m is None else m
    bubble = (layout.pp - 1) / layout.chunks if bubble is None else bubble
    return (m + bubble) * (forward + back)


@wrong("18.step_s", "Where is the bubble?")
def no_bubble(layout, global_batch, forward_s, tensor_s):
    return seconds(layout, global_batch, forward_s, tensor_s, bubble=0)


@wrong("18.step_s", "The last stage begins p - 1 forwards after the first")
def a_stage_too_many(layout, global_batch, forward_s, tensor_s):
    return seconds(layout, global_batch, forward_s, tensor_s, bubble=layout.pp)


@wrong("18.step_s", "Chunks make the bubble shorter")
def forgets_chunks(layout, global_batch, forward_s, tensor_s):
    return seconds(layout, global_batch, forward_s, tensor_s, bubble=layout.pp - 1)


@wrong("18.step_s", "A replica has a part of the rows alone")
def forgets_replicas(layout, global_batch, forward_s, tensor_s):
    return seconds(
        layout, global_batch, forward_s, tensor_s, m=global_batch / layout.microbatch
    )  # fmt: skip


@wrong("18.step_s", "Recomputing is a forward more")
def forgets_recompute(layout, global_batch, forward_s, tensor_s):
    return seconds(layout, global_batch, forward_s, tensor_s, again=0)


@wrong("18.step_s", "waits for its collectives again")
def recomputes_without_waiting(layout, global_batch, forward_s, tensor_s):
    return seconds(layout, global_batch, forward_s, tensor_s, again=forward_s)


@wrong("18.step_s", "A backward waits for as many collectives as a forward")
def twice_the_collectives(layout, global_batch, forward_s, tensor_s):
    return seconds(layout, global_batch, forward_s, tensor_s, back=2 * (forward_s + tensor_s))


@wrong("18.step_s", "Where is the time for collectives?")
def collectives_are_hidden(layout, global_batch, forward_s, tensor_s):
    return seconds(layout, global_batch, forward_s, 0.0)


@wrong("18.step_s", "A backward waits for tensor parallelism as well")
def backward_never_waits(layout, global_batch, forward_s, tensor_s):
    return seconds(layout, global_batch, forward_s, tensor_s, back=2 * forward_s)


@wrong("18.step_s", 'compare it with "full"')
def any_word_is_true(layout, global_batch, forward_s, tensor_s):
    always = replace(layout, recompute="full") if layout.recompute else layout
    return seconds(always, global_batch, forward_s, tensor_s)


@wrong("18.step_s", "a step takes None")
def no_return(layout, global_batch, forward_s, tensor_s):
    seconds(layout, global_batch, forward_s, tensor_s)


@wrong("18.step_s", "(m + (p-1)/v) times")
def something_else(layout, global_batch, forward_s, tensor_s):
    return 1.01 * seconds(layout, global_batch, forward_s, tensor_s)


@right("18.step_s")
def in_closed_form_of_the_library(layout, global_batch, forward_s, tensor_s):
    from labkit.predict import interleaved

    forward, back = forward_s + tensor_s, 2 * forward_s + tensor_s
    if layout.recompute == "full":
        back += forward
    m = layout.microbatches(global_batch)
    return interleaved(layout.pp, m, forward, back, layout.chunks).step_s


# ---- mfu_and_days(sizes, layout, global_batch, step_s, peak_flops_per_s, tokens)


def told(
    sizes, layout, global_batch, step_s, peak, tokens, layers=3, times=3, ranks=None, rows=None
):
    w, s = sizes.width, sizes.context
    of_layers = sizes.depth * (24 * w**2 + 4 * s * w)
    flops = global_batch * s * (layers * of_layers + times * 2 * w * sizes.vocab)
    ranks = layout.ranks if ranks is None else ranks
    rows = global_batch if rows is None else rows
    return flops / (ranks * peak * step_s), tokens / (rows * s) * step_s / 86400


@wrong("18.mfu_and_days", "that is hardware utilisation (HFU)")
def hardware(sizes, layout, global_batch, step_s, peak, tokens):
    return told(sizes, layout, global_batch, step_s, peak, tokens, layers=4)


@wrong("18.mfu_and_days", "not in per cent")
def in_per_cent(*given):
    mfu, days = told(*given)
    return 100 * mfu, days


@wrong("18.mfu_and_days", "a day has 86,400 seconds")
def hours(*given):
    mfu, days = told(*given)
    return mfu, 24 * days


@right("18.mfu_and_days")
def in_whole_steps(sizes, layout, global_batch, step_s, peak, tokens):
    mfu, _ = told(sizes, layout, global_batch, step_s, peak, tokens)
    return mfu, ceil(tokens / (global_batch * sizes.context)) * step_s / 86400


@wrong("18.mfu_and_days", "Backward is twice the forward")
def forward_alone(sizes, layout, global_batch, step_s, peak, tokens):
    return told(sizes, layout, global_batch, step_s, peak, tokens, layers=1, times=1)


@wrong("18.mfu_and_days", "That is the peak of one GPU")
def one_gpu(sizes, layout, global_batch, step_s, peak, tokens):
    return told(sizes, layout, global_batch, step_s, peak, tokens, ranks=1)


@wrong("18.mfu_and_days", "The GPUs of the dp axis are paid for, too")
def one_replica(sizes, layout, global_batch, step_s, peak, tokens):
    return told(
        sizes, layout, global_batch, step_s, peak, tokens, ranks=layout.tp * layout.pp
    )  # fmt: skip


@wrong("18.mfu_and_days", "attention's q kᵀ and its product with v, and the head")
def six_n_d(sizes, layout, global_batch, step_s, peak, tokens):
    flops = 72 * global_batch * sizes.context * sizes.depth * sizes.width**2
    _, days = told(sizes, layout, global_batch, step_s, peak, tokens)
    return flops / (layout.ranks * peak * step_s), days


@wrong("18.mfu_and_days", "rows of all replicas")
def rows_of_a_replica(sizes, layout, global_batch, step_s, peak, tokens):
    return told(
        sizes, layout, global_batch, step_s, peak, tokens, rows=global_batch / layout.dp
    )  # fmt: skip


@wrong("18.mfu_and_days", "two numbers: (mfu, days)")
def mfu_alone(sizes, layout, global_batch, step_s, peak, tokens):
    return told(sizes, layout, global_batch, step_s, peak, tokens)[0]


# ---- can_run(sizes, layout, gpus, global_batch, layer_bytes, budget_bytes)


def runs(
    sizes, layout, gpus, global_batch, layer_bytes, budget_bytes,
    ranks=True, heads=True, blocks=True, rows=True, groups=True, fits=True,
):  # fmt: skip
    m = layout.microbatches(global_batch)
    return not (
        (ranks and layout.ranks != gpus)
        or (heads and sizes.heads % layout.tp)
        or (blocks and sizes.depth % (layout.pp * layout.chunks))
        or (rows and global_batch % (layout.dp * layout.microbatch))
        or (groups and layout.chunks > 1 and m % layout.pp)
        or (fits and sum(held(sizes, layout, global_batch, layer_bytes).values()) > budget_bytes)
    )


@right("18.can_run")
def in_one_expression(*given):
    return runs(*given)


@wrong("18.can_run", "expected: False: something does not divide")
def any_number_of_ranks(*given):
    return runs(*given, ranks=False)


@wrong("18.can_run", "24 heads do not divide by 16")
def any_heads(*given):
    return runs(*given, heads=False)


@wrong("18.can_run", "stages of 2 chunks")
def forgets_the_chunks(sizes, layout, *given):
    return runs(sizes, layout, *given, blocks=False) and sizes.depth % layout.pp == 0


@wrong("18.can_run", "480 rows over")
def any_rows(*given):
    return runs(*given, rows=False)


@wrong("18.can_run", "micro-batches for")
def any_groups(*given):
    return runs(*given, groups=False)


@wrong("18.can_run", "False: it holds")
def never_looks_at_memory(*given):
    return runs(*given, fits=False)


@wrong("18.can_run", "any number of ranks that divides")
def powers_of_two_alone(sizes, layout, *given):
    axes = (layout.tp, layout.pp, layout.dp)
    return runs(sizes, layout, *given) and not any(one & (one - 1) for one in axes)


@wrong("18.can_run", "True: all divides, and it fits")
def as_many_micro_batches_as_stages(sizes, layout, gpus, global_batch, *given):
    enough = layout.microbatches(global_batch) >= layout.pp
    return runs(sizes, layout, gpus, global_batch, *given) and enough


@wrong("18.can_run", "True or False")
def as_a_number(*given):
    return int(runs(*given))


# ---- choose(job)


def best_of(job):
    return next(BEST[name] for name, one in JOBS.items() if one == job)


@right("18.choose")
def by_heart(job):
    return best_of(job)


BEST = {
    "an odd cluster": Layout(tp=1, pp=2, dp=48, microbatch=2, chunks=4, zero=1),
    "a slow wire": Layout(tp=4, pp=4, dp=4, microbatch=2, zero=1),
    "half the memory": Layout(
        tp=4, pp=2, dp=16, microbatch=2, chunks=8, zero=1, sequence=True
    ),
}  # fmt: skip


@wrong("18.choose", "choose returned None")
def keeps_it(job):
    best_of(job)


@wrong("18.choose", "expected: a Layout")
def three_numbers(job):
    return best_of(job).tp, best_of(job).pp, best_of(job).dp


@wrong("18.choose", "8 x 8 x 24 ranks on 96 GPUs")
def always_the_authors(job):
    return Layout(tp=8, pp=8, dp=24)


@wrong("18.choose", "36 blocks do not divide by 8")
def eight_stages(job):
    eight = Layout(tp=2, pp=8, dp=job.cluster.size // 16, zero=1)
    return eight if job.sizes.depth == 36 else best_of(job)


@wrong("18.choose", "zero=3: here are 0")
def zero_3(job):
    return replace(best_of(job), zero=3)


@wrong("18.choose", "no more than the 80 GB of a GPU")
def replicas_alone(job):
    return Layout(dp=job.cluster.size)


@wrong("18.choose", "Which choice makes the largest of these smaller")
def without_zero(job):
    return replace(best_of(job), zero=0)


@wrong("18.choose", "It computes every forward twice")
def recomputes(job):
    return replace(best_of(job), recompute="full")


@wrong("18.choose", "are there wires fast enough for so much tp?")
def tensor_parallel_everywhere(job):
    return Layout(tp=16, pp=2, dp=job.cluster.size // 32, zero=1)


@wrong("18.choose", "gradients travel once a step")
def no_stages(job):
    tp = 2 if job.sizes.width == 6144 else 8
    return Layout(tp=tp, dp=job.cluster.size // tp, microbatch=2, zero=1)
