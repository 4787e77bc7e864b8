"""Model parallelism at scale: what a layout costs on a cluster, and which to choose.

layout      a model's sizes, and the ranks along each axis
report      what a step in a layout takes, holds and sends
steps       step_report(sizes, layout, global_batch, cluster): that report
traces      step_trace(...): the same as a trace, to be drawn
published   GPTs of papers, and how they were trained

How a layout is chosen:

layouts     all that factor
fits        which of them fit, and the largest model that does
ranking     plan(sizes, cluster, global_batch): those that fit, the fastest first
reasons     why the others lose
written     a plan as a table and as JSON
models      GPTs by name
command     `labkit plan`

How a step is found (read in this order):

layers      each kind of layer, recorded once without data
updates     the optimizer's step on one, likewise
stages      which layers a stage has
places      where ranks stand on nodes
seconds     what a layer takes there
sends       bytes along each axis, and messages between stages
clock       the schedule, over many micro-batches
tail        the end of a step: gradients, the tied embedding, the optimizer
holding     what a rank holds at its peak

How near it comes:

calibration  published step times beside predicted ones, by fitted constants (tables/);
             plot.calibration() draws them, tests/benchmarks/calibrate.py repeats the fit
"""
