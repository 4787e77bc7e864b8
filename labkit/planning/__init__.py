"""Model parallelism at scale: what a layout costs on a cluster, and which to choose.

layout      a model's sizes, and the ranks along each axis
report      what a step in a layout takes, holds and sends
"""
