"""A schedule's picture shows what each stage does when, predicted or recorded."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from labkit import Comm, PacedStage, Pipeline, World, plot, record
from labkit.plot.pipelines import LIGHTEST
from labkit.plot.style import PHASES, contrast, text_on, tint
from labkit.replaying import by_microbatch, pipeline_trace
from labkit.replaying.pipeline import KIND, action_of, timed_actions
from labkit.schedules import Schedule, chunks_of, microbatches_of, one_f_one_b, parse, schedule
from labkit.trace import RankTrace, Span, Step, Trace
from laws import broken_laws
from tables import cases, raises, refusals
from test_plot import assert_readable, letterings, title, words

COSTS = {"forward": 2e-3, "backward": 3e-3, "input": 2e-3, "weight": 1e-3, "update": 0.0}
APART = [parse("F0 F1 I0 W0 I1 W1"), parse("F0 I0 F1 I1 W0 W1")]
CHUNKS = [parse("F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"), parse("F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1")]


Box = tuple[int, float, float, str]  # stage, begin, end and colour


def lanes(figure: Figure, panel: int = 0) -> list[PolyCollection]:
    """Of each stage: the idle time, and over it the actions."""
    return [x for x in figure.axes[panel].collections if isinstance(x, PolyCollection)]


def boxes(figure: Figure, panel: int = 0) -> list[Box]:
    """Of each action that is drawn, from left to right."""
    found = []
    for lane in lanes(figure, panel):
        for path, colour in list(zip(lane.get_paths(), lane.get_facecolor(), strict=True))[1:]:
            x, y = path.vertices[:, 0], path.vertices[:, 1]
            found.append((int(y.mean()), x.min(), x.max(), to_hex(colour).upper()))
    return sorted(found)


def assert_same_boxes(drawn: list[Box], expected: list[Box]) -> None:
    for box, other in zip(drawn, expected, strict=True):
        assert (box[0], box[3]) == (other[0], other[3])
        assert box[1:3] == pytest.approx(other[1:3])


def test_every_action_is_drawn_when_the_replay_has_it() -> None:
    schedule = one_f_one_b(3, 4)
    figure = plot.schedule(schedule, COSTS, 0.5e-3, name="1F1B")
    trace = pipeline_trace(schedule, lambda _, action: COSTS[action.phase], 0.5e-3)
    expected = sorted(
        (stage, x.began_s * 1e3, x.ended_s * 1e3, PHASES[x.action.phase])
        for stage, done in enumerate(timed_actions(trace))
        for x in done
    )
    assert len(expected) == 24
    assert_same_boxes(boxes(figure), expected)
    length_ms = max(x[2] for x in expected)
    bubble = 1 - sum(x[2] - x[1] for x in expected) / (3 * length_ms)
    assert title(figure) == (
        f"1F1B  ·  3 stages, 4 micro-batches  ·  {length_ms:.4g} ms  ·  "
        f"bubble {bubble:.1%} of the step"
    )
    by_stage = plot.schedule(one_f_one_b(2, 1), lambda stage, action: 1e-3 * (stage + 1))
    assert [round(end - begin, 9) for _, begin, end, _ in boxes(by_stage)] == [1, 1, 2, 2]


def test_without_costs_a_backward_is_two_forwards_and_chunks_share_them() -> None:
    for given, lengths in ((one_f_one_b(4, 8), {1.0, 2.0}), (CHUNKS, {0.5, 1.0})):
        drawn = boxes(plot.schedule(given))
        assert {round(end - begin, 9) for _, begin, end, _ in drawn} == lengths


@cases(
    ("gpipe", 1, 3 / 11), ("1f1b", 1, 3 / 11), ("interleaved", 2, 3 / 19), ("zb-h1", 1, 3 / 27),
    ("zb-h2", 1, 0.0), ("naive", 1, 0.75),
)  # fmt: skip
def test_the_title_has_the_published_bubble(name: str, chunks: int, bubble: float) -> None:
    """Of F = 1 and B = 2, or F = I = W = 1: (p-1)/(v m+p-1), (p-1)/(3m+p-1), 0."""
    figure = plot.schedule(schedule(name, 4, 8, chunks))
    assert f"bubble {bubble:.1%} of the step" in title(figure)
    sizes = [np.ptp(lane.get_paths()[0].vertices[:, 0]) for lane in lanes(figure)]
    busy = sum(end - begin for _, begin, end, _ in boxes(figure))
    assert 1 - busy / sum(sizes) == pytest.approx(bubble), "what is seen is what is said"


@cases(
    (one_f_one_b(4, 8), ["holds 4", "holds 3", "holds 2", "holds 1"]),
    (APART, ["holds 2", "holds 2"]),
    (CHUNKS, ["holds 2", "holds 1.5"]),
    ids=["1f1b", "zb", "v2"],
)
def test_numbers_are_in_boxes_and_what_is_held_beside(schedule: Schedule, held: list[str]) -> None:
    """A weight's gradient needs the activations; those of one chunk of two are half as many."""
    figure = plot.schedule(schedule)
    numbers = [int(name.text) for name in letterings(figure)[0].names]
    assert sorted(numbers) == sorted(x.microbatch for actions in schedule for x in actions)
    assert [text for text in words(figure) if text.startswith("holds")] == held


def test_phases_and_chunks_are_told_apart() -> None:
    apart, chunks = plot.schedule(APART), plot.schedule(CHUNKS)
    assert {x[3] for x in boxes(apart)} == {PHASES[x] for x in ("forward", "input", "weight")}
    assert {"forward", "backward: input", "backward: weights", "idle"} <= set(words(apart))
    assert len({x[3] for x in boxes(chunks)}) == 4
    assert "2 chunks" in title(chunks)
    assert "later chunks: lighter" in words(chunks)
    for colour in [*PHASES.values(), *(tint(x, LIGHTEST) for x in PHASES.values())]:
        assert contrast(colour, text_on(colour)) > 4.5


def test_a_gallery_is_on_one_axis_of_time() -> None:
    many = {"1F1B": one_f_one_b(4, 8), "apart": APART, "chunks": CHUNKS}
    figure = plot.schedules(many)
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    assert [title(figure, i).split("  ·  ")[0] for i in range(3)] == list(many)
    assert_readable(figure)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (4, 8), (33, 2), (2, 60)], ids=str)
def test_no_words_overlap(stages: int, microbatches: int) -> None:
    assert_readable(plot.schedule(one_f_one_b(stages, microbatches), name="1F1B"))
    given = Figure(figsize=(6, 3), dpi=100)
    plot.schedule(one_f_one_b(stages, microbatches), figure=given)
    assert given.axes


def recorded(schedule: Schedule, slower: float = 1.0, steps: int = 2) -> Trace:
    """As a recorder sees it: spans of modules inside, and the loss before backward begins."""
    paced = pipeline_trace(schedule, lambda _, action: slower * COSTS[action.phase])
    phase = {"input": "backward", "weight": "backward", "update": "optimizer"}
    ranks = {}
    for stage, done in enumerate(timed_actions(paced)):
        one = ranks[stage] = RankTrace(stage, len(schedule))
        for step in range(steps):
            later_s = 1.0 + step
            one.steps.append(Step(step, later_s, later_s + 0.9))
            for action, *when in done:
                name = phase.get(action.phase, action.phase)
                began_s, ended_s = (x + later_s for x in when)
                one.spans.append(Span(name, "", step, began_s, ended_s, 0, "Stage"))
                one.spans.append(Span(name, "inner", step, began_s, ended_s, 1, "Linear"))
            one.spans.append(Span("optimizer", "", step, later_s + 0.8, later_s + 0.9, 0, "SGD"))
            one.spans.append(Span("forward", "loss", step, later_s, later_s + 0.1, 0, "loss"))
    return Trace(ranks, {"paced": True})


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), APART, CHUNKS], ids=["1f1b", "zb", "v2"])
def test_a_recorded_run_is_drawn_as_its_schedule_was_before_it_ran(schedule: Schedule) -> None:
    before = plot.schedule(schedule, COSTS)
    after = plot.schedule(schedule, recorded=recorded(schedule))
    assert_same_boxes(boxes(after), boxes(before))
    numbers = [[x.text for x in letterings(figure)[0].names] for figure in (before, after)]
    assert numbers[0] == numbers[1]
    assert title(after) == f"{title(before)}  ·  paced"
    named = by_microbatch(recorded(schedule), schedule)
    assert boxes(plot.schedule(named)) == boxes(after)
    slower = plot.schedule(schedule, recorded=recorded(schedule, 2.0))
    twice = [(stage, 2 * begin, 2 * end, colour) for stage, begin, end, colour in boxes(after)]
    assert_same_boxes(boxes(slower), twice)


def test_spans_are_named_after_their_actions() -> None:
    trace = by_microbatch(recorded(APART), APART)
    spans = [span for span in trace.ranks[1].spans if span.kind == KIND]
    assert [span.module for span in spans] == ["0", "0", "1", "1", "0", "1"] * 2
    assert [str(action_of(x)) for x in spans] == ["F0", "I0", "F1", "I1", "W0", "W1"] * 2
    assert [x.kind for x in trace.ranks[1].spans if x.phase == "optimizer"] == ["SGD"] * 2
    for given in (APART, CHUNKS, one_f_one_b(2, 3)):
        replayed, named = pipeline_trace(given, COSTS), by_microbatch(recorded(given), given)
        names, twice = (
            [(x.phase, x.module) for x in trace.ranks[0].spans if x.kind == KIND]
            for trace in (replayed, named)
        )
        assert twice == names * 2
        actions = [[x.action for x in done] for done in timed_actions(replayed)]
        assert [list(map(str, stage)) for stage in actions] == [
            list(map(str, stage)) for stage in given
        ]
        assert plot.timeline(replayed).axes
    assert plot.timeline(trace).axes, "the usual timeline shows them too"


def loss_is_a_module(trace: Trace, schedule: Schedule) -> None:
    last, chunks = trace.ranks[1], chunks_of(schedule)
    forwards = [x for x in last.spans if (x.phase, x.depth, x.kind) == ("forward", 0, "Stage")]
    order = [x for x in schedule[1] if x.phase == "forward"] * 2
    for span, action in zip(forwards, order, strict=True):
        if action.chunk == chunks - 1:
            middle_s = (span.began_s + span.ended_s) / 2
            last.spans.append(Span("forward", "", span.step, middle_s, span.ended_s, 0, "MSELoss"))
            span.ended_s = middle_s


def loss_before_backward(trace: Trace, schedule: Schedule) -> None:
    for rank in trace.ranks.values():  # on stage 0 it is a wait
        spans = [x for x in rank.spans if x.depth == 0 and x.kind != "loss"]
        for span, following in pairwise(spans):
            if (span.phase, following.phase) == ("forward", "backward"):
                span.ended_s -= 1e-3 * rank.rank
                times = span.ended_s, following.began_s
                rank.spans.append(Span("forward", "loss", span.step, *times, 0, "loss"))


@cases(
    (loss_is_a_module, one_f_one_b(2, 3)),
    (loss_is_a_module, CHUNKS),
    (loss_before_backward, one_f_one_b(2, 3)),
    ids=["a module, 1f1b", "a module, v2", "before the backward, 1f1b"],
)
def test_a_loss_belongs_to_the_last_forward(
    add_loss: Callable[[Trace, Schedule], None], schedule: Schedule
) -> None:
    trace = recorded(schedule)
    add_loss(trace, schedule)
    drawn = boxes(plot.schedule(schedule, recorded=trace))
    assert_same_boxes(drawn, boxes(plot.schedule(schedule, COSTS)))


def test_a_run_by_another_schedule_is_refused() -> None:
    trace, (first, second) = recorded(one_f_one_b(2, 3)), one_f_one_b(2, 3)
    swapped = [[first[0], first[2], first[1], *first[3:]], second]
    words = "rank 0: action 1 of the schedule is B0, but the trace has forward"
    raises(words, by_microbatch, trace, swapped)
    raises("pass the schedule that was run", by_microbatch, trace, one_f_one_b(2, 4))
    raises(r"3 stages, but the trace has ranks \[0, 1\]", by_microbatch, trace, one_f_one_b(3, 3))
    raises("named after a micro-batch", plot.schedule, trace)


test_what_cannot_be_drawn_is_refused_with_a_reason = refusals(
    lambda draw: draw(),
    (lambda: plot.schedule([[], []]), "no action"),
    (lambda: plot.schedules({}), "nothing to draw"),
    (lambda: plot.schedule(APART, {"forward": 1.0}), "stage 0 runs I0, but .* has no 'input'"),
    (lambda: plot.schedule(recorded(APART), recorded=recorded(APART)), "two traces"),
    (lambda: plot.schedule(APART, recorded=recorded(APART), step=7), "no step 7"),
)


def run_paced(given: Schedule) -> None:
    """Two steps of stages that sleep; the loss is a module, too."""
    comm, chunks = Comm(), chunks_of(given)
    stages = [PacedStage(1e-3, 2e-3) for _ in range(comm.size * chunks)]
    pipe = Pipeline(stages, comm, given, loss_fn=torch.nn.MSELoss())
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x = torch.ones(microbatches_of(given), 8)
    for _ in range(2):
        pipe.step(x, x)
        optimizer.step()


@pytest.mark.slow
def test_a_paced_pipeline_is_recorded_and_drawn_as_its_schedule(world2: World) -> None:
    for name, chunks in (("gpipe", 1), ("interleaved", 2), ("zb-h1", 1)):
        given = schedule(name, 2, 4, chunks)
        with record(paced=True) as trace:
            world2.run(run_paced, given)
        named = by_microbatch(trace, given)
        assert broken_laws(named) == []
        assert [len(done) for done in timed_actions(named)] == [2 * len(own) for own in given]
        before, after = plot.schedule(given), plot.schedule(given, recorded=trace)
        assert [(x[0], x[3]) for x in boxes(before)] == [(x[0], x[3]) for x in boxes(after)]
        assert title(after).startswith("2 stages, 4 micro-batches")
        assert title(after).endswith("  ·  paced")
        assert_readable(after)
