"""Parameters and FLOPs of a transformer, for labkit.GPT.

A matmul of [m, k] by [k, n] is 2mkn FLOPs. Forward of one layer, b rows of s positions, width w:

    q, k, v, out     8 b s w²          q kᵀ              2 b s² w
    mlp             16 b s w²          weights times v   2 b s² w
                    24 b s w²                            4 b s² w

and, once, 2 b s w V for the head. For each matmul, backward runs two, one per factor's gradient.
Norms, GELU, softmax, dropout, sums and the optimizer are omitted. Attention counts in full,
as in PaLM, Megatron-LM and torch, even if a kernel skips the half that a causal mask hides.
"""

from labkit.predict.sizes import check_counts, check_divides, check_not_negative


def parameters(
    vocab: int,
    width: int,
    depth: int,
    heads: int,
    context: int,
    kv_heads: int | None = None,
    tied: bool = True,
) -> int:
    """Exact parameter count of labkit.GPT, about 12 depth width² plus the vocabulary. Source: arXiv
    2104.04473, section 5.1 (equation 2), plus 2 width for the last norm.

    >>> parameters(vocab=50257, width=12288, depth=96, heads=96, context=2048) / 1e9
    174.604259328
    """
    keys = _key_width(width, heads, kv_heads)
    check_counts(vocab=vocab, depth=depth, context=context)
    norms = 4 * width
    attention = 2 * (width**2 + width) + 2 * (width * keys + keys)
    mlp = 8 * width**2 + 5 * width
    head = 0 if tied else vocab * width
    return (vocab + context) * width + depth * (norms + attention + mlp) + 2 * width + head


def layer_forward_flops(
    width: int, heads: int, rows: int, sequence: int, kv_heads: int | None = None
) -> int:
    """FLOPs of one layer's forward: 24 b s w² + 4 b s² w, less with fewer key-value heads. Source:
    Narayanan et al. (Megatron-LM), arXiv 2104.04473, appendix ("Floating-point operations")."""
    keys = _key_width(width, heads, kv_heads)
    check_counts(rows=rows, sequence=sequence)
    positions = rows * sequence
    matrices = 2 * positions * (2 * width**2 + 2 * width * keys + 8 * width**2)
    return matrices + attention_core_flops(width, rows, sequence)


def attention_core_flops(width: int, rows: int, sequence: int) -> int:
    """FLOPs of one layer's two attention matmuls in forward, q kᵀ and softmax times v: 4 b s² w."""
    return 4 * rows * sequence**2 * width


def forward_flops(
    vocab: int,
    width: int,
    depth: int,
    heads: int,
    rows: int,
    sequence: int,
    kv_heads: int | None = None,
) -> int:
    """FLOPs of a model's forward: all layers and the head. Source: arXiv 2104.04473, appendix."""
    check_counts(vocab=vocab, depth=depth)
    layers = depth * layer_forward_flops(width, heads, rows, sequence, kv_heads)
    return layers + 2 * rows * sequence * width * vocab


def step_flops(
    vocab: int,
    width: int,
    depth: int,
    heads: int,
    rows: int,
    sequence: int,
    kv_heads: int | None = None,
    flash: bool = False,
    recompute: bool = False,
) -> int:
    """FLOPs of forward and backward for `rows` sequences, as MFU counts them: three times the
    forward. A device may compute more. `flash`: an attention kernel without stored scores, like
    labkit.GPT's, computes q kᵀ again, 2 b s² w per layer. `recompute`: full recomputation, so 96
    instead of 72 b s depth w². Source: arXiv 2104.04473, appendix (with recompute, equation 3);
    Kaplan, arXiv 2001.08361, section 2.1; FlashAttention, arXiv 2205.14135, section 3.1."""
    flops = 3 * forward_flops(vocab, width, depth, heads, rows, sequence, kv_heads)
    if flash:
        flops += depth * attention_core_flops(width, rows, sequence) // 2
    if recompute:
        flops += depth * layer_forward_flops(width, heads, rows, sequence, kv_heads)
    return flops


def dense_flops(parameters: float, tokens: float) -> float:
    """6 N D: FLOPs to train N parameters on D tokens, without the attention core. N from
    `parameters` also counts positions, biases and norms, which are in no matmul. Source: Kaplan et
    al., arXiv 2001.08361, section 2.1."""
    check_not_negative(parameters=parameters, tokens=tokens)
    return 6 * parameters * tokens


def _key_width(width: int, heads: int, kv_heads: int | None) -> int:
    """The width of k and of v, over all key-value heads."""
    kv_heads = heads if kv_heads is None else kv_heads
    check_counts(width=width, heads=heads, kv_heads=kv_heads)
    check_divides("width", width, "heads", heads)
    check_divides("heads", heads, "kv_heads", kv_heads)
    return width * kv_heads // heads
