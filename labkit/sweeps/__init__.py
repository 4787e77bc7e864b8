"""Times of collectives over sizes: sweep.py is the data, alpha_beta.py the model fitted to it.

`labkit bench collectives` measures a sweep, `plot.bandwidth` draws it.
"""
