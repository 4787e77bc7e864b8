"""Pipeline schedules in closed form: idle time and memory per stage.

    p stages, m micro-batches, v chunks per stage; F and B: seconds of a micro-batch's forward and
    backward on one stage, over all its chunks

                         bubble                        peak micro-batches in flight (first stage)
    naive                m (p-1)(F+B)                  1
    GPipe                (p-1)(F+B)                    m
    1F1B                 (p-1)(F+B)                    min(p, m)
    interleaved 1F1B     (p-1)(F+B) / v                p (1 + (p-1)/(p v)),  v > 1
    ZB-H1                (p-1)(F+I-W)                  p
    ZB-H2                (p-1)(F+I-2W)                 2p - 1
    PipeDream            (p-1)(F+B), once per run      min(p, m)

ZB splits backward into I seconds for the input gradient, for which the previous stage waits, and W
for the weight gradient. After its warm-up forwards, the first stage waits for its first I, and no W
can fill this wait: (p-1) I after p forwards, (p-1)(I-F) after 2p - 1. The functions return the
larger of the two bubbles. Assumptions: stages are equally fast, and messages take no time.
"""

from dataclasses import dataclass

from labkit.predict.sizes import check_counts, check_divides, check_not_negative


@dataclass(frozen=True)
class PipelineStep:
    """The forward and backward of all micro-batches on one stage of a pipeline. Never compare
    one schedule's `of_ideal` (the Megatron-LM paper's bubble) with another's `of_total`."""

    ideal_s: float  # compute time
    bubble_s: float  # idle time
    peak_microbatches: float  # in flight at once on the first stage

    @property
    def step_s(self) -> float:
        return self.ideal_s + self.bubble_s

    @property
    def of_ideal(self) -> float:
        """The bubble divided by the compute time, (p-1)/m for 1F1B."""
        return self.bubble_s / self.ideal_s if self.ideal_s else 0.0

    @property
    def of_total(self) -> float:
        """The bubble divided by the step time, (p-1)/(m+p-1) for 1F1B."""
        return self.bubble_s / self.step_s if self.step_s else 0.0


def naive(stages: int, microbatches: int, forward_s: float, backward_s: float) -> PipelineStep:
    """One micro-batch at a time, through all stages and back. Source: arXiv 1811.06965, figure 2b.

    >>> naive(stages=4, microbatches=8, forward_s=1, backward_s=2).of_total
    0.75
    """
    step = gpipe(stages, microbatches, forward_s, backward_s)
    return PipelineStep(step.ideal_s, microbatches * step.bubble_s, 1)


def gpipe(stages: int, microbatches: int, forward_s: float, backward_s: float) -> PipelineStep:
    """All forwards, then all backwards. Source: arXiv 1811.06965 and 2104.04473, section 2.2.1."""
    check_counts(stages=stages, microbatches=microbatches)
    check_not_negative(forward_s=forward_s, backward_s=backward_s)
    one_s = forward_s + backward_s
    return PipelineStep(microbatches * one_s, (stages - 1) * one_s, microbatches)


def one_f_one_b(
    stages: int, microbatches: int, forward_s: float, backward_s: float
) -> PipelineStep:
    """1F1B (PipeDream-flush): GPipe's bubble, less memory. Source: arXiv 2104.04473, section 2.2.1.

    >>> one_f_one_b(stages=4, microbatches=8, forward_s=1, backward_s=2).of_ideal
    0.375
    """
    step = gpipe(stages, microbatches, forward_s, backward_s)
    return PipelineStep(step.ideal_s, step.bubble_s, min(stages, microbatches))


def interleaved(
    stages: int, microbatches: int, forward_s: float, backward_s: float, chunks: int
) -> PipelineStep:
    """1F1B with `chunks` model chunks per stage: a bubble 1/v as long, v times the messages, and
    more memory. Sources: arXiv 2104.04473, section 2.2.2; arXiv 2205.05198, section 4.2 (memory).
    Raises ValueError if `microbatches` is not divisible by `stages`."""
    check_counts(chunks=chunks)
    plain = one_f_one_b(stages, microbatches, forward_s, backward_s)
    if chunks == 1:
        return plain
    check_divides("microbatches", microbatches, "stages", stages)
    peak = min(stages * (1 + (stages - 1) / (stages * chunks)), microbatches)
    return PipelineStep(plain.ideal_s, plain.bubble_s / chunks, peak)


def pipedream(
    stages: int, microbatches: int, forward_s: float, backward_s: float, update_s: float = 0.0
) -> PipelineStep:
    """PipeDream never flushes the pipeline: it has 1F1B's bubble once per run of `microbatches`,
    and keeps a weight version for each micro-batch in flight. `update_s`: optimizer time per
    micro-batch. Source: arXiv 1806.03377, section 3.2."""
    check_not_negative(update_s=update_s)
    plain = one_f_one_b(stages, microbatches, forward_s, backward_s)
    ideal_s = plain.ideal_s + microbatches * update_s
    return PipelineStep(ideal_s, plain.bubble_s, plain.peak_microbatches)


def zero_bubble_h1(
    stages: int, microbatches: int, forward_s: float, input_s: float, weight_s: float
) -> PipelineStep:
    """ZB-H1: weight gradients fill 1F1B's idle time without more memory. Source: Qi et al., arXiv
    2401.10241, section 2.3 (where T_B is the input gradient alone). Raises ValueError if
    `microbatches` < `stages`."""
    each_s = max(forward_s + input_s - weight_s, input_s)
    parts_s = {"forward_s": forward_s, "input_s": input_s, "weight_s": weight_s}
    return _zero_bubble(stages, microbatches, each_s, stages, **parts_s)


def zero_bubble_h2(
    stages: int, microbatches: int, forward_s: float, input_s: float, weight_s: float
) -> PipelineStep:
    """ZB-H2: twice the memory, but no bubble if F = I = W. Source: arXiv 2401.10241, section 2.3.
    Raises ValueError for fewer than `2 * stages - 1` micro-batches."""
    each_s = max(forward_s + input_s - 2 * weight_s, input_s - forward_s, 0.0)
    parts_s = {"forward_s": forward_s, "input_s": input_s, "weight_s": weight_s}
    return _zero_bubble(stages, microbatches, each_s, 2 * stages - 1, **parts_s)


def _zero_bubble(
    stages: int, microbatches: int, each_s: float, peak: int, **parts_s: float
) -> PipelineStep:
    """`each_s`: the bubble that each stage after the first adds; `parts_s`: per micro-batch."""
    check_counts(stages=stages, microbatches=microbatches)
    check_not_negative(**parts_s)
    if microbatches < peak:
        raise ValueError(
            f"microbatches={microbatches}: with {stages} stages, this schedule needs {peak} or more"
        )
    return PipelineStep(microbatches * sum(parts_s.values()), (stages - 1) * each_s, peak)
