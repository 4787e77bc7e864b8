"""Model parallelism at scale: what a layout costs on a cluster, and which to choose.

layout, published    a model's sizes, ranks along each axis, all layouts that divide; known GPTs
layers               each kind of layer and the optimizer's step on it, recorded without data
stages               which layers a stage has, where its ranks sit, and what they take
communication        bytes along each axis, and messages between stages
clock                the schedule, over many micro-batches
step_model           all of these, and the end of the step
peak_memory          what a rank holds at its peak
steps, report        step_report and step_trace, from that model; why a step is slower
ranking, plan        plan(sizes, cluster, global_batch): the layouts that fit, the fastest first
calibration          published step times beside predicted ones, by fitted constants (tables/)
"""
