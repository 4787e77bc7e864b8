from answers import right, wrong
from labkit.schedules import (
    Action,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipedream,
    zero_bubble_h1,
    zero_bubble_h2,
)

# ---- my_1f1b(stage, stages, microbatches)


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


@wrong("16.my_1f1b", "no more than min(p - stage, m)")
def all_forwards_first(stage, stages, microbatches):
    return gpipe(stages, microbatches)[stage]


@wrong("16.my_1f1b", "How many forwards does a stage do")
def one_at_a_time(stage, stages, microbatches):
    return naive(stages, microbatches)[stage]


@wrong("16.my_1f1b", "stage 0 does F3 at position 3, and there are 3 micro-batches")
def forgets_small_batches(stage, stages, microbatches):
    actions = [Action("forward", k) for k in range(stages + 3)]
    return actions + [Action("backward", k) for k in range(microbatches)]


@wrong("16.my_1f1b", "never does B4")
def leaves_the_rest(stage, stages, microbatches):
    done = one_f_one_b(stages, microbatches)[stage]
    return done[: len(done) - (stages - 1 - stage)]


@wrong("16.my_1f1b", "an Action is needed")
def words(stage, stages, microbatches):
    return [str(one) for one in one_f_one_b(stages, microbatches)[stage]]


@wrong("16.my_1f1b", "Does the function end with a return?")
def returns_nothing(stage, stages, microbatches):
    one_f_one_b(stages, microbatches)


@wrong("16.my_1f1b", "neither halves nor updates")
def without_a_flush(stage, stages, microbatches):
    return pipedream(stages, microbatches)[stage]


# ---- warm_up(stage, stages, microbatches, chunks)


@wrong("16.warm_up", "goes through all chunks of all stages")
def as_in_1f1b(stage, stages, microbatches, chunks):
    return min(stages - 1 - stage, microbatches)


@wrong("16.warm_up", "it idles 2.5 with messages")
def one_for_each_stage(stage, stages, microbatches, chunks):
    return min((chunks - 1) * stages + stages - 1 - stage, microbatches * chunks)


@wrong("16.warm_up", "where messages cost nothing")
def the_last_stage_for_all(stage, stages, microbatches, chunks):
    return (chunks - 1) * stages


@wrong("16.warm_up", "the step is as short, and it holds less")
def one_round_more(stage, stages, microbatches, chunks):
    return min(chunks * stages + 2 * (stages - 1 - stage), microbatches * chunks)


@wrong("16.warm_up", "it has no more")
def forgets_that_there_are_few(stage, stages, microbatches, chunks):
    return (chunks - 1) * stages + 2 * (stages - 1 - stage)


@wrong("16.warm_up", "a whole number")
def a_list(stage, stages, microbatches, chunks):
    return [Action("forward", k) for k in range(stages)]


# ---- zb_h1(stage, stages, microbatches)


@right("16.zb_h1")
def as_in_the_library(stage, stages, microbatches):
    return zero_bubble_h1(stages, microbatches)[stage]


def halves(actions):
    """Each backward as I and, at once, W."""
    found = []
    for one in actions:
        phases = ("input", "weight") if one.phase == "backward" else (one.phase,)
        found += [one._replace(phase=phase) for phase in phases]
    return found


@wrong("16.zb_h1", "How late may W be")
def weights_at_once(stage, stages, microbatches):
    return halves(one_f_one_b(stages, microbatches)[stage])


@wrong("16.zb_h1", "W may not wait for ever")
def all_weights_at_the_end(stage, stages, microbatches):
    actions = halves(one_f_one_b(stages, microbatches)[stage])
    late = [one for one in actions if one.phase == "weight"]
    return [one for one in actions if one.phase != "weight"] + late


@wrong("16.zb_h1", "never does W3, the other half of I3")
def forgets_the_late_ones(stage, stages, microbatches):
    actions = zero_bubble_h1(stages, microbatches)[stage]
    return [one for one in actions if one != ("weight", 3, 0)]


@wrong("16.zb_h1", "weight after input")
def weights_first(stage, stages, microbatches):
    actions = halves(one_f_one_b(stages, microbatches)[stage])
    swap = {"input": "weight", "weight": "input"}
    return [one._replace(phase=swap.get(one.phase, one.phase)) for one in actions]


@wrong("16.zb_h1", "is both halves at once")
def whole_backwards(stage, stages, microbatches):
    return one_f_one_b(stages, microbatches)[stage]


@wrong("16.zb_h1", "W may not wait for ever")
def h2(stage, stages, microbatches):
    if microbatches < 2 * stages - 1:
        return zero_bubble_h1(stages, microbatches)[stage]
    return zero_bubble_h2(stages, microbatches)[stage]


# ---- invent(job)


def forwards_ahead(job, chunks, ahead):
    """Interleaved in halves: stage r does `ahead[r]` forwards before its first I, and as many W
    late as there is room for."""
    p, m = job.stages, job.microbatches
    groups = range(0, m, p)
    forwards = [(k, c) for g in groups for c in range(chunks) for k in range(g, g + p)]
    backwards = [(k, chunks - 1 - c) for k, c in forwards]
    schedule = []
    for count in ahead:
        late = job.held * chunks - count
        actions = [Action("forward", *one) for one in forwards[:count]]
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
    """The best known."""
    chunks, ahead = {
        4: (2, (8, 7, 6, 5)),
        5: (2, (10, 8, 6, 5)),
        6: (2, (11, 7, 6, 5)),
        7: (1, (7, 5, 3, 1)),
    }[job.held]
    return forwards_ahead(job, chunks, ahead)


@right("16.invent")
def always_h1(job):
    return zero_bubble_h1(job.stages, job.microbatches)


@wrong("16.invent", "less than 1F1B's 27.3%")
def plain_1f1b(job):
    return one_f_one_b(job.stages, job.microbatches)


@wrong("16.invent", "for the memory of 1F1B, stage 0 holds 8 micro-batches")
def plain_gpipe(job):
    return gpipe(job.stages, job.microbatches)


@wrong("16.invent", "stage 0 holds 5.5 micro-batches")
def two_chunks(job):
    return interleaved(job.stages, job.microbatches, 2)


@wrong("16.invent", "expected: 4 at most")
def always_h2(job):
    return zero_bubble_h2(job.stages, job.microbatches)


@wrong("16.invent", "An update in the middle is another training")
def asynchronous(job):
    return pipedream(job.stages, job.microbatches)


@wrong("16.invent", "expected: 1 or 2")
def four_chunks(job):
    return interleaved(job.stages, job.microbatches, 4)


@wrong("16.invent", "a rule is broken. deadlock: stage")
def swapped(job):
    schedule = zero_bubble_h1(job.stages, job.microbatches)
    early = [Action("forward", k) for k in range(5)]  # stage 0 has done 4 before its first I
    schedule[3] = early + [one for one in schedule[3] if one not in early]
    return schedule


@wrong("16.invent", "expected: 4 lists")
def one_list(job):
    return zero_bubble_h1(job.stages, job.microbatches)[0]


@wrong("16.invent", "expected: 4 lists")
def by_name(job):
    return "zb-h1"
