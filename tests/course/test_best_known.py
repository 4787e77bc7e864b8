"""The best known scores of the checks, found again by searches that students do not get."""

import random
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch

from labkit.labs.lab_04 import scenarios as servers
from labkit.labs.lab_05 import buckets
from labkit.labs.lab_07 import buckets as peaks
from labkit.labs.lab_09 import scenarios as codebooks
from labkit.labs.lab_10 import scales
from labkit.labs.lab_10.wrong_answers import Following
from labkit.labs.lab_12 import offload
from labkit.labs.lab_13 import chain
from labkit.labs.lab_14 import hybrid


def test_the_largest_parameters_first_each_to_the_server_that_has_least() -> None:
    nbytes = servers.sizes_of_gpt()
    load, server_of = [0] * servers.SERVERS, [0] * len(nbytes)
    for i in sorted(range(len(nbytes)), key=lambda i: -nbytes[i]):
        server_of[i] = load.index(min(load))
        load[server_of[i]] += nbytes[i]
    assert servers.busiest_link_bytes(server_of, nbytes) == servers.BEST_BYTES


def test_no_buckets_leave_less_to_wait_for() -> None:
    least_us = [least_wait_us(*buckets.gradients_of(x)) for x in (buckets.SLOW, buckets.FAST)]
    assert round(sum(least_us)) == buckets.BEST_US


def least_wait_us(nbytes: Sequence[int], ready_us: Sequence[float]) -> float:
    """Dynamic programming: ends[j] is the earliest end of the first j gradients' messages."""
    ends = [0.0]
    for j in range(1, len(nbytes) + 1):
        begins_us = [max(end, ready_us[j - 1]) for end in ends]
        sends_us = [buckets.all_reduce_us(sum(nbytes[i:j])) for i in range(j)]
        ends.append(min(map(sum, zip(begins_us, sends_us, strict=True))))
    return ends[-1] - ready_us[-1]


SEEDS = 17, 23  # of 60 seeds tried for the random cuts, those that lead to the lowest peaks


def test_moving_the_ends_of_buckets_finds_the_lowest_peak_known() -> None:
    assert round(sum(map(lowest_peak_bytes, peaks.backwards())) / 1e3) == peaks.BEST_KB


def lowest_peak_bytes(case: peaks.Backward) -> int:
    total = len(case.nbytes)
    cuts = [
        sorted(random.Random(seed).sample(range(1, total), peaks.MESSAGES - 1)) for seed in SEEDS
    ]
    return min(after_moves(case, [0, *ends, total]) for ends in cuts)


def after_moves(case: peaks.Backward, ends: list[int]) -> int:
    """The peak when moving the end of any one bucket lowers it no further."""
    peak_bytes = case.peak_bytes(peaks.counts_of(ends))
    for place in range(1, len(ends) - 1):
        for end in range(ends[place - 1] + 1, ends[place + 1]):
            moved = [*ends[:place], end, *ends[place + 1 :]]
            if case.peak_bytes(peaks.counts_of(moved)) < peak_bytes:
                return after_moves(case, moved)
    return peak_bytes


def test_lloyds_algorithm_finds_the_best_codebook_known() -> None:
    """Lloyd, "Least squares quantization in PCM", 1982."""
    x = codebooks.sample(seed=0).sort().values
    levels = x[torch.linspace(40, len(x) - 41, 2**codebooks.BITS).long()].clone()
    for _ in range(300):
        which = (x[:, None] - levels).abs().argmin(dim=1)
        counts = torch.bincount(which, minlength=2**codebooks.BITS)
        sums = torch.zeros_like(levels).index_add(0, which, x)
        levels = torch.where(counts > 0, sums / counts, levels)
    error = codebooks.codebook_error(levels.tolist())
    assert round(error * 1e6) == codebooks.BEST_MILLIONTHS


def test_following_the_largest_gradient_loses_the_fewest_known() -> None:
    ways = product((1, 2, 4, 8, 16), [2 ** (i / 4) for i in range(2, 26)])
    lost = [
        scales.total_lost(scales.scales_of(partial(Following, steps, room))) for steps, room in ways
    ]
    assert min(lost) == scales.BEST_LOST


def test_exchanging_blocks_finds_the_fastest_plan_known() -> None:
    assert round(sum(map(fastest_us, offload.models())) / 1e3) == offload.BEST_MS


def fastest_us(model: offload.Offloaded) -> float:
    """The fastest pass, starting from as many kept blocks as fit, from either end."""
    blocks = range(len(model.nbytes))
    best = model.pass_us(set(), 1)
    for ahead, order in product((1, 2, 3), (blocks, blocks[::-1])):
        keep: set[int] = set()
        for k in order:
            if model.held_bytes(keep | {k}, ahead) <= model.cap_bytes:
                keep |= {k}
        best = min(best, after_exchanges(model, keep, ahead))
    return best


def after_exchanges(model: offload.Offloaded, keep: set[int], ahead: int) -> float:
    """The time when adding, dropping or exchanging any one block shortens it no further."""
    pass_us = model.pass_us(keep, ahead)
    for k, j in product(range(len(model.nbytes)), repeat=2):
        changed = keep ^ {k} ^ ({j} if j != k else set())
        fits = model.held_bytes(changed, ahead) <= model.cap_bytes
        if fits and model.pass_us(changed, ahead) < pass_us - 1e-6:
            return after_exchanges(model, changed, ahead)
    return pass_us


def test_of_all_cuts_of_the_chain_none_sends_fewer_bytes() -> None:
    every = list(product(chain.WAYS, repeat=len(chain.CHAIN) - 1))
    held = [chain.held(ways, chain.CHAIN, chain.RANKS) for ways in every]
    sent = [chain.sent_bytes(ways) for ways in every]
    least = [
        min(bytes_ for elements, bytes_ in zip(held, sent) if elements <= budget)
        for budget in map(chain.budget_elements, chain.BUDGETS)
    ]
    assert sum(least) == chain.BEST_BYTES


def test_no_choice_of_neighbors_exposes_less() -> None:
    least = [min(hybrid.exposed_us(x, u) for u in hybrid.choices(x)) for x in hybrid.JOBS.values()]
    assert round(sum(least)) == hybrid.BEST_US
