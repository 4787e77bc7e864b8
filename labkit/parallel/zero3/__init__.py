"""ZeRO stage 3: also shards parameters, which are gathered only while their unit computes.

zero3.py          the strategy: hooks that gather a unit before it computes, and free it afterward
units.py          which modules form a unit
flat.py           the flat buffers of a unit: gather, free, reduce-scatter
passes.py         unit order for prefetch; pending gradients
validation.py     rejects models and optimizers that ZeRO-3 cannot shard
state.py          the model's shards and its full state dict
sharded_init.py   sharding a model while it is built
"""
