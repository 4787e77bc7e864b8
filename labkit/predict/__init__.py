"""The closed formulas: bytes, memory, operations, bubble and time, each in one place, each cited.

    predict.model_state_bytes(7.5e9, dp=64, stage=2)                  # memory of one rank
    predict.table(formula={...}, replayed={...}, measured={...})      # side by side

A formula is plain arithmetic: no torch, no clock, no chance. Where it leaves something out, its
docstring says what. The names of sizes are those of labkit.GPT: vocab, width, depth, heads,
context; `rows` are the sequences that one rank computes at once, `sequence` is their length.
"""

from labkit.lazy import lazy

FORMULAS = {  # by module
    # parameters, gradients and optimizer state of a rank: ZeRO
    "states": ("FP32_ADAM", "MIXED_ADAM", "StateBytes", "model_state_bytes"),
    # what forward keeps for backward; the same, beside what is measured
    "activations": ("activation_bytes", "activation_terms", "first_stage_activation_bytes",
                    "flash_activation_bytes"),
    "bills": ("Bill", "activation_bill"),
    # parameters and FLOPs of a GPT
    "transformer": ("dense_flops", "forward_flops", "layer_forward_flops", "parameters",
                    "step_flops"),
    # bytes that data, tensor and pipeline parallelism send in a step; the time of a collective
    "volumes": ("algorithm_s", "bus_factor", "data_parallel_bytes", "gathered_logits_bytes",
                "least_s", "pipeline_parallel_bytes", "stage_boundary_bytes",
                "tensor_parallel_bytes", "vocab_parallel_bytes"),
    # the same by axes of a mesh, for each stage, exactly
    "three_d": ("bytes_by_axis",),
    # what ring attention and Ulysses send, and when the ring is hidden
    "context": ("ring_attention_bytes", "ring_exposed_s", "ring_hides_from", "ring_step_scores",
                "ulysses_bytes"),
    # bubble and activations of pipeline schedules
    "pipelines": ("PipelineStep", "gpipe", "interleaved", "naive", "one_f_one_b", "pipedream",
                  "zero_bubble_h1", "zero_bubble_h2"),
    # the time of a step, and of a model whose weights come over a bus; MFU
    "steps": ("compute_s", "ddp_step_s", "ddp_step_without_overlap_s", "in_place_s",
              "load_then_run_s", "mfu", "pipelined_loading_s"),
    # the same quantities from several sources, beside each other
    "tables": ("Table", "table"),
}  # fmt: skip
__all__, __getattr__, __dir__ = lazy(
    __name__, {name: f"{__name__}.{home}" for home, names in FORMULAS.items() for name in names}
)
