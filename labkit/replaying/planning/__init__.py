"""Model parallelism at scale: what a layout costs on a cluster, and which to choose.

layout, published    a model's sizes, ranks along each axis, all layouts that divide; known GPTs,
                     and their measured step times beside predicted ones

A step is put together in this order:

layers               each kind of layer and the optimizer's step on it, recorded without data
stages               which layers a stage has, where its ranks sit, and what they take
clock                the schedule, over many micro-batches
step_model           all of these, messages between stages, and the end of the step
peak_memory          what a rank holds at its peak
steps, report        step_report and step_trace, from that model; why a step is slower
ranking, plan        plan(sizes, cluster, global_batch): the layouts that fit, the fastest first
"""
