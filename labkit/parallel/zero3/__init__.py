"""ZeRO stage 3: parameters are sharded, too, and gathered only while their unit computes.

zero3.py          the strategy: hooks that gather a unit before it computes, and free it after
units.py          which modules form a unit
flat.py           the flat buffers of a unit: gather, free, reduce-scatter
passes.py         the order of units, for prefetch; pending gradients
validation.py     models that cannot be sharded; optimizers that cannot step on shards
state.py          the model's shards and its full state dict
sharded_init.py   sharding a model while it is built
"""
