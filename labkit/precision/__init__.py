"""Low-precision number formats, and the techniques that keep training with them correct."""
