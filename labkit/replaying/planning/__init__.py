"""Model parallelism at scale: what a layout costs on a cluster, and which to choose.

layout          a model's sizes, the ranks along each axis, and all layouts that divide
report          what a step in a layout takes, holds and sends, and why it is slower than another
steps           step_report(sizes, layout, global_batch, cluster): that report
traces          step_trace(...): the same as a trace, to be drawn

How a layout is chosen:

feasibility     which layouts fit, and the largest model that does
ranking         plan(sizes, cluster, global_batch): those that fit, the fastest first
render          a plan as a table and as JSON
published       GPTs of papers by name, and how they were trained

How a step is predicted (read in this order):

layers          each kind of layer and the optimizer's step on it, recorded once without data
placement       where ranks sit on nodes, and what a collective takes there
stages          which layers a stage has, and what they take
communication   bytes along each axis, and messages between stages
clock           the schedule, over many micro-batches
step_end        gradients, the tied embedding, the optimizer
peak_memory     what a rank holds at its peak

How near it comes:

calibration     published step times beside predicted ones, by fitted constants (tables/);
                plot.calibration() draws them, tests/benchmarks/calibrate.py repeats the fit
"""
