"""Every pipeline schedule is held to the rules of a pipeline (see `rules`)."""

from collections.abc import Callable, Iterator

import pytest

from labkit.schedules import Action, Schedule, one_f_one_b

SCHEDULES = {"1f1b": one_f_one_b}
SIZES = [(1, 1), (1, 5), (2, 1), (3, 2), (4, 4), (4, 7), (5, 3), (8, 32)]


def broken_rules(schedule: Schedule, microbatches: int) -> Iterator[str]:
    wanted = {Action(phase, k) for phase in ("forward", "backward") for k in range(microbatches)}
    for stage, actions in enumerate(schedule):
        if len(actions) != len(wanted) or set(actions) != wanted:
            yield f"stage {stage} does not do each forward and backward exactly once"
    done: set[tuple[int, Action]] = set()
    places = [0] * len(schedule)
    going_on = True
    while going_on:  # as far as what each action needs has been done
        going_on = False
        for stage, actions in enumerate(schedule):
            while places[stage] < len(actions):
                phase, k, _ = actions[places[stage]]
                needs = [(stage - 1, Action("forward", k))] if stage else []
                if phase == "backward":
                    needs = [(stage, Action("forward", k))]
                    needs += [(stage + 1, Action("backward", k))] * (stage + 1 < len(schedule))
                if not all(one in done for one in needs):
                    break
                done.add((stage, actions[places[stage]]))
                places[stage] += 1
                going_on = True
    if places != [len(actions) for actions in schedule]:
        yield f"deadlock: the stages come to their actions {places}"


def peak_in_flight(actions: list[Action]) -> int:
    """Micro-batches whose activations a stage holds at the same time."""
    held = peak = 0
    for action in actions:
        held += 1 if action.phase == "forward" else -1
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_a_schedule_keeps_the_rules(
    make: Callable[[int, int], Schedule], stages: int, microbatches: int
) -> None:
    schedule = make(stages, microbatches)
    assert len(schedule) == stages
    assert not list(broken_rules(schedule, microbatches))


@pytest.mark.parametrize(
    ("stages", "rule"),
    [
        (["f0 f1 b0"], "exactly once"),
        (["f0 f0 b0 b1"], "exactly once"),
        (["b0 f0 f1 b1"], "deadlock"),
        (["f0 f1 b0 b1", "b0 f0 b1 f1"], "deadlock"),
        (["f0 b0 f1 b1", "f0 f1 b0 b1"], "deadlock"),  # its b0 waits for what comes after f1
    ],
)
def test_the_rules_can_be_broken(stages: list[str], rule: str) -> None:
    phase = {"f": "forward", "b": "backward"}
    schedule = [
        [Action(phase[one[0]], int(one[1:])) for one in actions.split()] for actions in stages
    ]
    assert rule in "; ".join(broken_rules(schedule, 2))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_1f1b_holds_few_micro_batches(stages: int, microbatches: int) -> None:
    """min(p, m) on stage 0 (arXiv 2104.04473, section 2.2.1), one less on each that follows."""
    peaks = [peak_in_flight(actions) for actions in one_f_one_b(stages, microbatches)]
    assert peaks == [min(stages - stage, microbatches) for stage in range(stages)]


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_wrong_sizes_are_named(make: Callable[[int, int], Schedule]) -> None:
    with pytest.raises(ValueError, match="stages=0"):
        make(0, 3)
    with pytest.raises(ValueError, match="microbatches=-1"):
        make(3, -1)
