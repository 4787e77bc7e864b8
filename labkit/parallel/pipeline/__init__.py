"""Pipeline parallelism: each rank has some layers; micro-batches go from rank to rank.

pipeline.py           the strategy: one loop that runs any schedule
virtual_stage.py      one stage: its forward, its backward, and their halves; PipeDream's versions
p2p.py                messages: receives posted ahead, sends that are not waited for
scatter_gather.py     ... of which tensor-parallel ranks send a part each
synchronising.py      gradients of replicas and of tied parameters
deferred_weights.py   the gradient of weights apart: zero-bubble schedules
stages.py             layers of a model under their names; ../splitting.py cuts a model into stages
validation.py         sizes, schedules and stages that do not fit
"""
