"""Model parallelism at scale: what a layout costs on a cluster, and which to choose.

layout, published    a model's sizes, all layouts that divide; known GPTs, measured step times
layers               each kind of layer and its optimizer step, recorded without data
stages, clock        the layers of each stage and their times; the schedule over micro-batches
step_model           these, messages between stages, and the end of the step
peak_memory          peak memory of a rank
steps, report        step_report and step_trace; why a step is slower
ranking, plan        plan(sizes, cluster, global_batch): the layouts that fit, fastest first
"""
