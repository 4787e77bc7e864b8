"""Model parallelism at scale: the time and memory of each layout, and the fastest layout that fits.

layout, published    model sizes and their valid layouts; known GPTs and measured step times
layers               each kind of layer and its optimizer step, recorded without data
stages, clock        layers and times per stage; timing of the schedule over micro-batches
step_model           the costs of a step: stages, messages between stages, and the step's end
peak_memory          the peak memory of a rank
steps, report        step_report and step_trace; reasons why a layout is slower
ranking, plan        plan(sizes, cluster, global_batch): the layouts that fit, fastest first
"""
