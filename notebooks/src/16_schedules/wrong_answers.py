from answers import Solution, right, wrong
from labkit.schedules import Action, zero_bubble_h1

# ---- my_1f1b(stage, stages, microbatches)

Solution("16.my_1f1b").slips("""
all_forwards_first: no more than min(p - stage, m)
    return make_schedule("gpipe", stages, microbatches)[stage]
one_at_a_time: How many forwards does a stage run
    return make_schedule("naive", stages, microbatches)[stage]
ignores_the_number_of_microbatches: stage 0 runs F3 at position 3, but there are 3 micro-batches
    min(stages - 1 - stage, microbatches) -> stages + 3
drops_the_cool_down: never runs B4
    return actions -> return actions[: len(actions) - (stages - 1 - stage)]
strings: pass an Action
    return actions -> return [str(action) for action in actions]
returns_nothing: Does the function end with a return?
    return actions -> pass
without_a_flush: no half backwards or updates
    return make_schedule("pipedream", stages, microbatches)[stage]
""")


@right("16.my_1f1b")
def backward_when_it_can(stage, stages, microbatches):
    actions, held, done = [], 0, 0
    for k in range(microbatches):
        if held == stages - stage:
            actions.append(Action("backward", done))
            held, done = held - 1, done + 1
        actions.append(Action("forward", k))
        held += 1
    return actions + [Action("backward", k) for k in range(done, microbatches)]


# ---- warm_up(stage, stages, microbatches, chunks)

Solution("16.warm_up").slips("""
as_in_1f1b: passes through all chunks of all stages
    return min(stages - 1 - stage, microbatches)
one_per_following_stage: stages are idle for 2.5 if messages take time
    2 * (stages - 1 - stage) -> stages - 1 - stage
the_last_stage_for_all: if messages are free
    + 2 * (stages - 1 - stage) ->
one_group_more: with fewer forwards, the step takes no longer
    (chunks - 1) * stages -> chunks * stages
forgets_the_limit: the number of its forwards
    return (chunks - 1) * stages + 2 * (stages - 1 - stage)
a_list: a whole number
    return [Action("forward", k) for k in range(stages)]
""")

# ---- zb_h1(stage, stages, microbatches)

Solution("16.zb_h1").slips("""
weights_at_once: How late can W be
    if k >= stage: -> if k < microbatches:
    Action("weight", k - stage) -> Action("weight", k)
all_weights_at_the_end: W cannot come that late
    return actions -> return sorted(actions, key=lambda action: action.phase == "weight")
drops_the_last_weight: never runs W3, the other half of I3
    return actions -> return [action for action in actions if action != ("weight", 3, 0)]
weights_first: weight after input
    if k >= stage: -> if k < microbatches:
    Action("input", k) -> Action("weight", k)
    Action("weight", k - stage) -> Action("input", k)
whole_backwards: is both halves: split it
    Action("input", k) -> Action("backward", k)
    if k >= stage: -> if False:
as_in_the_library
    return make_schedule("zb-h1", stages, microbatches)[stage]
h2: W cannot come that late
    return make_schedule(
        "zb-h2" if microbatches >= 2 * stages - 1 else "zb-h1", stages, microbatches
    )[stage]
""")


# ---- invent(job)

Solution("16.invent").slips("""
plain_1f1b: less than 1F1B's 27.3%
    return make_schedule("1f1b", job.stages, job.microbatches)
plain_gpipe: for the memory of 1F1B, stage 0 holds 8 micro-batches
    return make_schedule("gpipe", job.stages, job.microbatches)
two_chunks: stage 0 holds 5.5 micro-batches
    return make_schedule("interleaved", job.stages, job.microbatches, chunks=2)
always_h2: expected: at most 4
    return make_schedule("zb-h2", job.stages, job.microbatches)
asynchronous: An update within the step changes training
    return make_schedule("pipedream", job.stages, job.microbatches)
four_chunks: expected: 1 or 2
    return make_schedule("interleaved", job.stages, job.microbatches, chunks=4)
one_list: expected: 4 lists
    return schedule -> return schedule[0]
by_name: expected: 4 lists
    return "zb-h1"
always_h1
    return make_schedule("zb-h1", job.stages, job.microbatches)
""")


def forwards_ahead(job, chunks, ahead):
    """Interleaved with split backwards: stage r runs `ahead[r]` forwards before its first I, and
    delays its W as far as its memory allows."""
    p, m = job.stages, job.microbatches
    groups = range(0, m, p)
    forwards = [(k, c) for g in groups for c in range(chunks) for k in range(g, g + p)]
    backwards = [(k, chunks - 1 - c) for k, c in forwards]
    schedule = []
    for count in ahead:
        late = job.held * chunks - count
        actions = [Action("forward", *chunk) for chunk in forwards[:count]]
        for i in range(len(forwards) + late):
            if i < len(forwards):
                actions.append(Action("input", *backwards[i]))
            if i >= late:
                actions.append(Action("weight", *backwards[i - late]))
            if count + i < len(forwards):
                actions.append(Action("forward", *forwards[count + i]))
        schedule.append(actions)
    return schedule


@right("16.invent")
def chunks_and_halves(job):
    """The best known schedule."""
    chunks, ahead = {
        4: (2, (8, 7, 6, 5)),
        5: (2, (10, 8, 6, 5)),
        6: (2, (11, 7, 6, 5)),
        7: (1, (7, 5, 3, 1)),
    }[job.held]
    return forwards_ahead(job, chunks, ahead)


@wrong("16.invent", "the schedule breaks a rule: deadlock: stage")
def swapped(job):
    schedule = zero_bubble_h1(job.stages, job.microbatches)
    early = [Action("forward", k) for k in range(5)]  # stage 0 runs 4 before its first I
    schedule[3] = early + [action for action in schedule[3] if action not in early]
    return schedule
