"""Finds the least recomputation that meets a memory budget.

    held
     │            ╭─╮ head           budget ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄
     │        ╭───╯ ╰╮
     │     ╭──╯      ╰─╮╭╮                level_i  = before + kept_0 + ... + kept_{i-1}
     │   ╭─╯           ╰╯╰─╮╭╮            block i  : level_i + need_i  <= budget
     │ ╭─╯                 ╰╯╰─           the rest : level_n + head    <= budget
     └──────────────────────────────>
       block 0, 1, 2  head  2, 1, 0

Only the level and the moved bytes couple the blocks, so dynamic programming over both is exact.

Sources: trade-off of Chen et al., arXiv 1604.06174, section 4; dynamic programming as in Beaumont
et al., "Optimal checkpointing for heterogeneous chains", arXiv 1911.13214.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Cost of one choice for one block; `need_bytes` counts from the level before the forward."""

    kept_bytes: int  # from the block's forward to its backward
    need_bytes: int  # the peak, including kept_bytes
    again_flops: int = 0  # recomputed in backward
    moved_bytes: int = 0  # to the host, counted one way


@dataclass(frozen=True)
class Costs:
    """Costs of each choice per block, in forward order, and of the rest of the model."""

    blocks: Sequence[Mapping[str, Cost]]
    before_bytes: int = 0  # the level before the first block: weights, optimizer state
    head_bytes: int = 0  # the peak above the last level, before the last block's backward
    after_bytes: int = 0  # the peak above the first level, after the first block's backward
    leaving_bytes: int = 0  # the most bytes in flight to the host, if any block offloads
    step_flops: int = 0  # of a step without recomputation


@dataclass(frozen=True)
class Plan:
    """A choice per block, and the plan's peak memory, recomputation and transfers per step."""

    choices: tuple[str, ...]
    peak_bytes: int  # of forward and backward
    again_flops: int
    moved_bytes: int
    step_flops: int = 0

    @property
    def again(self) -> float:
        """Recomputed FLOPs as a fraction of the step's FLOPs."""
        return self.again_flops / self.step_flops if self.step_flops else 0.0

    def __str__(self) -> str:
        counts = {name: self.choices.count(name) for name in dict.fromkeys(self.choices)}
        mix = ", ".join(f"{count} × {name}" for name, count in counts.items())
        return f"{mix}: {self.peak_bytes:,} bytes at the peak, {self.again:.1%} recomputed"


def plan_of(costs: Costs, choices: Sequence[str]) -> Plan:
    """The plan for `choices`. Raises ValueError if the choices do not match the blocks."""
    if len(choices) != len(costs.blocks):
        raise ValueError(
            f"{len(choices)} choices for {len(costs.blocks)} blocks; pass one for each block"
        )
    for block, name in zip(costs.blocks, choices):
        if name not in block:
            raise ValueError(
                f"{name!r} is not a choice of this block; choose one of {', '.join(block)}"
            )
    chosen = [block[name] for block, name in zip(costs.blocks, choices)]
    flops = sum(cost.again_flops for cost in chosen)
    moved = sum(cost.moved_bytes for cost in chosen)
    level = costs.before_bytes + (costs.leaving_bytes if moved else 0)
    peak = level + costs.after_bytes
    for cost in chosen:
        peak, level = max(peak, level + cost.need_bytes), level + cost.kept_bytes
    return Plan(tuple(choices), max(peak, level + costs.head_bytes), flops, moved, costs.step_flops)


def least_recompute(costs: Costs, budget_bytes: int, most_moved_bytes: int = 0) -> Plan:
    """The plan with the fewest recomputed FLOPs within the budget; ties go to the lowest final
    level. `most_moved_bytes`: the most bytes that may move to the host during a forward.

    Raises ValueError if no plan fits, naming the smallest budget that works."""
    plan = _search(costs, budget_bytes, most_moved_bytes)
    if plan is None:
        least = smallest_budget(costs, most_moved_bytes)
        raise ValueError(
            f"no plan fits within a budget of {budget_bytes:,} bytes; choose at least {least:,} "
            "bytes, or make the batch smaller"
        )
    return plan


def smallest_budget(costs: Costs, most_moved_bytes: int = 0) -> int:
    """The lowest peak of any plan."""
    budgets = range(_ceiling(costs))
    return bisect_left(budgets, True, key=lambda x: bool(_search(costs, x, most_moved_bytes)))


def front(costs: Costs, most_moved_bytes: int = 0) -> list[Plan]:
    """The Pareto front of recomputed FLOPs and peak memory, highest peak first."""
    most = _ceiling(costs)
    plans: list[Plan] = []
    while (plan := _search(costs, most, most_moved_bytes)) is not None:
        if plans and plan.again_flops == plans[-1].again_flops:
            plans.pop()  # the new plan needs less memory for equal FLOPs
        plans.append(plan)
        most = plan.peak_bytes - 1
    return plans


def _ceiling(costs: Costs) -> int:
    most = sum(max(cost.need_bytes for cost in block.values()) for block in costs.blocks)
    return sum((costs.before_bytes, most, costs.head_bytes, costs.after_bytes, costs.leaving_bytes))


@dataclass(frozen=True, order=True)
class _State:
    """Choices for blocks 0 to i-1, ordered by FLOPs first."""

    flops: int
    level: int
    moved: int
    choices: tuple[str, ...] = ()


def _search(costs: Costs, budget_bytes: int, most_moved_bytes: int) -> Plan | None:
    """The best plan within the budget, with or without offloading."""
    plans = [_walk(costs, budget_bytes, 0)]
    if most_moved_bytes:
        plans.append(_walk(costs, budget_bytes - costs.leaving_bytes, most_moved_bytes))
    return min(
        (plan for plan in plans if plan is not None),
        key=lambda plan: (plan.again_flops, plan.peak_bytes),
        default=None,
    )


def _walk(costs: Costs, budget_bytes: int, most_moved_bytes: int) -> Plan | None:
    if costs.before_bytes + costs.after_bytes > budget_bytes:
        return None
    states = [_State(0, costs.before_bytes, 0)]
    for block in costs.blocks:
        states = _pareto_optimal(
            _State(
                state.flops + cost.again_flops,
                state.level + cost.kept_bytes,
                state.moved + cost.moved_bytes,
                (*state.choices, name),
            )
            for state in states
            for name, cost in block.items()
            if state.level + cost.need_bytes <= budget_bytes
            and state.moved + cost.moved_bytes <= most_moved_bytes
        )
    fitting = [state for state in states if state.level + costs.head_bytes <= budget_bytes]
    return plan_of(costs, min(fitting).choices) if fitting else None


def _pareto_optimal(states: Iterable[_State]) -> list[_State]:
    """The Pareto-optimal states in FLOPs, level and moved bytes."""
    kept: list[_State] = []
    stairs: list[tuple[int, int]] = []  # (level, moved) of `kept`: levels rise, bytes fall
    for state in sorted(states):
        place = bisect_left(stairs, (state.level + 1,))  # earlier entries have no higher level
        if place and stairs[place - 1][1] <= state.moved:
            continue
        kept.append(state)
        while place < len(stairs) and stairs[place][1] >= state.moved:
            del stairs[place]
        insort(stairs, (state.level, state.moved))
    return kept
