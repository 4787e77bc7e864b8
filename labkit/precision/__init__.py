"""Low-precision number formats, and what keeps training with them correct."""
