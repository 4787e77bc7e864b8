"""Model states: the parameters, gradients and optimizer state on one rank.

                 parameters    gradients    optimizer
    stage 0      2             2            K                data parallelism: all states replicated
    stage 1      2             2            K / n            optimizer state sharded
    stage 2      2             2 / n        K / n            gradients, too
    stage 3      2 / n         2 / n        K / n            parameters, too

Bytes per parameter, with n data-parallel ranks, for Adam in mixed precision: 16-bit parameters and
gradients, and K = 12 for the fp32 master copy and two moments.
"""

from typing import NamedTuple

from labkit.predict.sizes import check_counts, check_not_negative


class StateBytes(NamedTuple):
    """Bytes per parameter, by kind of state."""

    parameter: float
    gradient: float
    optimizer: float


MIXED_ADAM = StateBytes(2, 2, 12)  # optimizer: master copy 4, first moment 4, second moment 4
FP32_ADAM = StateBytes(4, 4, 8)  # labkit's Single and DDP: all in float32, two moments


def model_state_bytes(
    parameters: float, dp: int = 1, stage: int = 0, per_parameter: StateBytes = MIXED_ADAM
) -> float:
    """Bytes of model states on one rank, for the `parameters` of the model or of this rank's part,
    sharded over `dp` ranks by ZeRO `stage` 0 (plain data parallelism) to 3, at `per_parameter`
    bytes each. Omits activations, buffers, allocator overhead, step counts (4 bytes per tensor)
    and unequal shards. Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, sections 3.1 and 5,
    Figure 1, Table 1. Raises ValueError for any other stage.

    >>> model_state_bytes(7.5e9, dp=64, stage=1) / 1e9
    31.40625
    """
    check_not_negative(parameters=parameters)
    check_counts(dp=dp)
    if stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage={stage}: choose ZeRO stage 1 (shards optimizer state), 2 (gradients, too) or "
            "3 (parameters, too), or 0 for plain data parallelism"
        )
    held = (
        per_parameter.parameter / (dp if stage >= 3 else 1)
        + per_parameter.gradient / (dp if stage >= 2 else 1)
        + per_parameter.optimizer / (dp if stage >= 1 else 1)
    )
    return parameters * held
