"""ZeRO stage 3: parameters are sharded, too; a unit's are whole only while it computes.

zero3.py          the strategy: hooks that gather a unit before it computes, and free it after
units.py          which modules make a unit
flat.py           a unit's parameters in one flat tensor: gather, free, reduce-scatter
passes.py         the order of units, for prefetch; gradients that are yet to be reduced
validation.py     what cannot be sharded, and optimizers that cannot step on shards
state.py          what a user sees of the model: its shards, its whole state
sharded_init.py   models that are sharded while they are built
"""
