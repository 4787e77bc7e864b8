"""Lab 18's checks: their right results equal the library's, and the best score is reachable."""

from dataclasses import replace

import pytest

from labkit.labs.lab_18 import checks as check
from labkit.labs.lab_18.scenarios import (
    BEST_S,
    CASES,
    CLUSTERS,
    JOBS,
    Candidate,
    Case,
    candidates,
    replayed_step_s,
    right_bytes,
    why_invalid,
)
from labkit.labs.lab_18.wrong_answers import BEST
from labkit.predict import interleaved
from labkit.replaying.planning.ranking import least_bytes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_memory_of_a_rank_equals_that_of_a_plan(case) -> None:
    """The plan's formulas leave out dropout masks, as the lab says."""
    right, plan = right_bytes(case), least_bytes(*case)
    states = ("parameters", "gradients", "optimizer state")
    assert [right[name] for name in states] == pytest.approx([plan[name] for name in states])
    if case.layout.recompute == "full":
        assert right["activations"] == pytest.approx(plan["activations"])
    else:
        assert 0.8 * right["activations"] < plan["activations"] < right["activations"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_replayed_step_is_the_closed_form(case) -> None:
    layout = case.layout
    again = 5.0 if layout.recompute == "full" else 0.0
    step = interleaved(layout.pp, case.microbatches, 5.0, 9.0 + again, layout.chunks)
    assert replayed_step_s(layout, case.global_batch, 4.0, 1.0) == pytest.approx(step.step_s)


def test_a_layout_can_run_if_it_divides_and_fits() -> None:
    """The rules of the exercise agree with the planner on each candidate."""
    verdicts = set()
    for candidate in candidates():
        (sizes, layout, rows), gpus, budget_bytes = candidate
        stages, replica_rows = layout.pp * layout.chunks, layout.dp * layout.microbatch
        rules = {
            "ranks": layout.ranks == gpus,
            "heads": sizes.heads % layout.tp == 0,
            "blocks": sizes.depth % stages == 0,
            "rows": rows % replica_rows == 0,
            "groups": layout.chunks == 1 or layout.microbatches(rows) % layout.pp == 0,
        }
        if all(rules.values()):
            rules["fits"] = sum(right_bytes(candidate.case).values()) <= budget_bytes
        broken = [rule for rule, holds in rules.items() if not holds]
        assert bool(why_invalid(candidate)) == bool(broken), f"{candidate}: {broken}"
        if len(broken) < 2:
            verdicts.update(broken or ["runs"])
    # Some candidate breaks only this rule, so an answer without the rule is wrong.
    assert verdicts == {"runs", "ranks", "heads", "blocks", "rows", "groups", "fits"}


def test_the_clusters_are_selene_with_one_number_changed() -> None:
    assert [cluster.size for cluster in CLUSTERS.values()] == [96, 64, 128]
    assert "between nodes 3.12 Gb/s per GPU" in str(JOBS["a slow network"])
    assert "128 GPUs of 40 GB" in str(JOBS["half the memory"])


@pytest.mark.slow
def test_the_best_known_is_reachable_and_no_neighbor_is_faster() -> None:
    score = check.choose(lambda job: next(BEST[name] for name in JOBS if JOBS[name] == job)).score
    assert score is not None and score.value == score.best
    for name, job in JOBS.items():
        best = job.report(BEST[name])
        assert best.step_s == pytest.approx(BEST_S[name], rel=1e-4)
        for other in _neighbors(BEST[name]):
            case = Case(job.sizes, other, job.global_batch)
            if why_invalid(Candidate(case, job.cluster.size, float("inf"))):
                continue
            try:
                report = job.report(other)
            except ValueError:
                continue
            if report.peak_bytes <= job.cluster.device.memory_bytes:
                assert report.step_s >= best.step_s, f"{name}: {other} is faster"


def _neighbors(layout):
    """Layouts with one choice changed, or with ranks moved from one axis to another."""
    yield replace(layout, tp=layout.tp * 2, dp=layout.dp // 2)
    if layout.tp > 1:
        yield replace(layout, tp=layout.tp // 2, dp=layout.dp * 2)
    for chunks in (1, 2, 4, 8, 16):
        yield replace(layout, chunks=chunks)
        for times in (2, 4):
            yield replace(layout, pp=layout.pp * times, dp=layout.dp // times, chunks=chunks)
            if layout.pp >= times:
                more = dict(pp=layout.pp // times, dp=layout.dp * times)
                yield replace(layout, **more, chunks=chunks)
    yield replace(layout, zero=0)
