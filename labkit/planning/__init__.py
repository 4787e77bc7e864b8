"""Model parallelism at scale: what a layout costs on a cluster, and which to choose.

layout      a model's sizes, and the ranks along each axis
report      what a step in a layout takes, holds and sends
steps       step_report(sizes, layout, global_batch, cluster): that report

How a step is found (read in this order):

layers      each kind of layer, recorded once without data
stages      which layers a stage has
places      where ranks stand on nodes
seconds     what a layer takes there
clock       the schedule, over many micro-batches
holding     what a rank holds at its peak
"""
