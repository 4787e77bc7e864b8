"""Model parallelism at scale: what a layout costs on a cluster, and which to choose.

layout               a model's sizes, ranks along each axis, all layouts that divide
layers, stages       each kind of layer, recorded without data; stages, and their seconds
clock                the schedule, over many micro-batches
step_model           both, messages between stages, and the end of the step
peak_memory          what a rank holds at its peak
steps, report        step_report and step_trace, from that model; why a step is slower
ranking, plan        plan(sizes, cluster, global_batch): the layouts that fit, the fastest first
published            known GPTs; step times beside predicted ones, by fitted constants (tables/)
"""
