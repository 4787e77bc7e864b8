"""Pipeline parallelism: each rank has some layers; micro-batches go from rank to rank.

pipeline.py           the strategy: one loop that runs any schedule
stages.py             a model cut into stages
virtual_stage.py      one piece: its forward, its backward, and their halves
p2p.py                messages: receives posted ahead, sends that are not waited for
scatter_gather.py     ... of which tensor-parallel ranks send a part each
tied.py               parameters that several stages share
synchronising.py      replicas of stages: averaged once a step
deferred_weights.py   the gradient of weights apart: zero-bubble schedules
weight_versions.py    PipeDream: updates without a flush
paced_stage.py        a stage of a given duration, for plots on few cores
validation.py         sizes, schedules and stages that do not fit
"""
