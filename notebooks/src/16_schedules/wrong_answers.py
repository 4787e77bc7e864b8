from answers import Solution, right, wrong
from labkit.schedules import Action, zero_bubble_h1, zero_bubble_h2

# ---- my_1f1b(stage, stages, microbatches)

my_1f1b = Solution("16.my_1f1b")
my_1f1b.returns(
    "all_forwards_first",
    "no more than min(p - stage, m)",
    'make_schedule("gpipe", stages, microbatches)[stage]',
)
my_1f1b.returns(
    "one_at_a_time",
    "How many forwards does a stage do",
    'make_schedule("naive", stages, microbatches)[stage]',
)
my_1f1b.wrong(
    "forgets_small_batches",
    "stage 0 does F3 at position 3, and there are 3 micro-batches",
    {"min(stages - 1 - stage, microbatches)": "stages + 3"},
)
my_1f1b.wrong(
    "leaves_the_rest",
    "never does B4",
    {"return actions": "return actions[: len(actions) - (stages - 1 - stage)]"},
)
my_1f1b.wrong(
    "words", "an Action is needed", {"return actions": "return [str(one) for one in actions]"}
)
my_1f1b.wrong("returns_nothing", "Does the function end with a return?", {"return actions": "pass"})
my_1f1b.returns(
    "without_a_flush",
    "neither halves nor updates",
    'make_schedule("pipedream", stages, microbatches)[stage]',
)


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

warm_up = Solution("16.warm_up")
warm_up.returns(
    "as_in_1f1b", "goes through all chunks of all stages", "min(stages - 1 - stage, microbatches)"
)
warm_up.wrong(
    "one_for_each_stage",
    "it idles 2.5 with messages",
    {"2 * (stages - 1 - stage)": "stages - 1 - stage"},
)
warm_up.wrong(
    "the_last_stage_for_all", "where messages cost nothing", {" + 2 * (stages - 1 - stage)": ""}
)
warm_up.wrong(
    "one_round_more",
    "the step is as short, and it holds less",
    {"(chunks - 1) * stages": "chunks * stages"},
)
warm_up.returns(
    "forgets_that_there_are_few",
    "it has no more",
    "(chunks - 1) * stages + 2 * (stages - 1 - stage)",
)
warm_up.returns("a_list", "a whole number", '[Action("forward", k) for k in range(stages)]')

# ---- zb_h1(stage, stages, microbatches)

zb_h1 = Solution("16.zb_h1")
zb_h1.wrong(
    "weights_at_once",
    "How late may W be",
    {
        "if k >= stage:": "if k < microbatches:",
        'Action("weight", k - stage)': 'Action("weight", k)',
    },
)
zb_h1.wrong(
    "all_weights_at_the_end",
    "W may not wait for ever",
    {"return actions": 'return sorted(actions, key=lambda one: one.phase == "weight")'},
)
zb_h1.wrong(
    "forgets_the_late_ones",
    "never does W3, the other half of I3",
    {"return actions": 'return [one for one in actions if one != ("weight", 3, 0)]'},
)
zb_h1.wrong(
    "weights_first",
    "weight after input",
    {
        "if k >= stage:": "if k < microbatches:",
        'Action("input", k)': 'Action("weight", k)',
        'Action("weight", k - stage)': 'Action("input", k)',
    },
)
zb_h1.wrong(
    "whole_backwards",
    "is both halves at once",
    {
        'Action("input", k)': 'Action("backward", k)',
        "if k >= stage:": "if False:",
    },
)


@right("16.zb_h1")
def as_in_the_library(stage, stages, microbatches):
    return zero_bubble_h1(stages, microbatches)[stage]


@wrong("16.zb_h1", "W may not wait for ever")
def h2(stage, stages, microbatches):
    if microbatches < 2 * stages - 1:
        return zero_bubble_h1(stages, microbatches)[stage]
    return zero_bubble_h2(stages, microbatches)[stage]


# ---- invent(job)

invent = Solution("16.invent")
invent.returns(
    "plain_1f1b", "less than 1F1B's 27.3%", 'make_schedule("1f1b", job.stages, job.microbatches)'
)
invent.returns(
    "plain_gpipe",
    "for the memory of 1F1B, stage 0 holds 8 micro-batches",
    'make_schedule("gpipe", job.stages, job.microbatches)',
)
invent.returns(
    "two_chunks",
    "stage 0 holds 5.5 micro-batches",
    'make_schedule("interleaved", job.stages, job.microbatches, chunks=2)',
)
invent.returns(
    "always_h2", "expected: 4 at most", 'make_schedule("zb-h2", job.stages, job.microbatches)'
)
invent.returns(
    "asynchronous",
    "An update in the middle is another training",
    'make_schedule("pipedream", job.stages, job.microbatches)',
)
invent.returns(
    "four_chunks",
    "expected: 1 or 2",
    'make_schedule("interleaved", job.stages, job.microbatches, chunks=4)',
)
invent.wrong("one_list", "expected: 4 lists", {"return schedule": "return schedule[0]"})
invent.returns("by_name", "expected: 4 lists", '"zb-h1"')


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


@wrong("16.invent", "a rule is broken. deadlock: stage")
def swapped(job):
    schedule = zero_bubble_h1(job.stages, job.microbatches)
    early = [Action("forward", k) for k in range(5)]  # stage 0 has done 4 before its first I
    schedule[3] = early + [one for one in schedule[3] if one not in early]
    return schedule
