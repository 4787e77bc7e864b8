"""Pipeline parallelism: each rank holds some layers; micro-batches pass from rank to rank.

pipeline.py           the strategy: one loop that runs any schedule
virtual_stage.py      one stage: forward, backward (whole or in halves); PipeDream's weight versions
p2p.py                messages: receives posted ahead, non-blocking sends
scatter_gather.py     messages split over tensor-parallel ranks
grad_sync.py          gradients of replicas and of tied parameters
deferred_weights.py   weight gradients computed later: zero-bubble schedules
stages.py             layers under their names in the model; ../splitting.py creates stages
validation.py         validation of sizes, schedules and stages
"""
