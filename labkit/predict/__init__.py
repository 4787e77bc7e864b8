"""Closed-form formulas for bytes sent, memory, FLOPs, bubbles and time, with their sources.

    predict.model_state_bytes(7.5e9, dp=64, stage=2)                  # memory of one rank
    predict.table(formula={...}, replayed={...}, measured={...})      # side by side

Formulas are plain arithmetic; docstrings name what they omit. Sizes are named as in labkit.GPT;
`rows` is the number of sequences that one rank computes at once, and `sequence` is their length.
"""

from labkit.predict.activations import (
    Bill,
    activation_bill,
    activation_bytes,
    activation_terms,
    first_stage_activation_bytes,
    flash_activation_bytes,
)
from labkit.predict.collectives import algorithm_s, bus_factor, least_s
from labkit.predict.context import (
    ring_attention_bytes,
    ring_exposed_s,
    ring_hides_from,
    ring_step_scores,
    ulysses_bytes,
)
from labkit.predict.loading import in_place_s, load_then_run_s, pipelined_loading_s
from labkit.predict.pipelines import (
    PipelineStep,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipedream,
    zero_bubble_h1,
    zero_bubble_h2,
)
from labkit.predict.states import FP32_ADAM, MIXED_ADAM, StateBytes, model_state_bytes
from labkit.predict.steps import (
    compute_s,
    ddp_step_s,
    ddp_step_without_overlap_s,
    mfu,
)
from labkit.predict.tables import Table, table
from labkit.predict.three_d import bytes_by_axis
from labkit.predict.transformer import (
    dense_flops,
    forward_flops,
    layer_forward_flops,
    parameters,
    step_flops,
)
from labkit.predict.volumes import (
    data_parallel_bytes,
    gathered_logits_bytes,
    pipeline_parallel_bytes,
    stage_boundary_bytes,
    tensor_parallel_bytes,
    vocab_parallel_bytes,
)

__all__ = [
    "FP32_ADAM", "MIXED_ADAM", "Bill", "PipelineStep", "StateBytes", "Table", "activation_bill",
    "activation_bytes", "activation_terms", "algorithm_s", "bus_factor", "bytes_by_axis",
    "compute_s", "data_parallel_bytes", "ddp_step_s", "ddp_step_without_overlap_s", "dense_flops",
    "first_stage_activation_bytes", "flash_activation_bytes", "forward_flops",
    "gathered_logits_bytes", "gpipe", "in_place_s", "interleaved", "layer_forward_flops",
    "least_s", "load_then_run_s", "mfu", "model_state_bytes", "naive", "one_f_one_b",
    "parameters", "pipedream", "pipeline_parallel_bytes", "pipelined_loading_s",
    "ring_attention_bytes", "ring_exposed_s", "ring_hides_from", "ring_step_scores",
    "stage_boundary_bytes", "step_flops", "table", "tensor_parallel_bytes", "ulysses_bytes",
    "vocab_parallel_bytes", "zero_bubble_h1", "zero_bubble_h2",
]  # fmt: skip
