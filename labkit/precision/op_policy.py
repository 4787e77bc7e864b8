"""Autocast's op policy: lists of ops per device type.

    low       matmuls: nearly all FLOPs, which GPUs run on tensor cores in 16 bits
    fp32      ops that leave fp16's range (exp, pow, sums, norms), or lose accuracy (losses)
    promote   inputs of mixed dtypes are cast to the widest
    others    run in their input dtypes: gelu, dropout, reshape, indexing

The lists are torch's (aten/src/ATen/autocast_mode.cpp and autocast_mode.h). Devices differ:

    op                                    cpu             cuda
    softmax, log_softmax                  input dtype     fp32
    layer_norm, group_norm, rms_norm      input dtype     fp32
    exp, log, pow, sum, cumsum, norm      input dtype     fp32
    mv, addmv, rnn cells                  input dtype     low
    FFTs, matrix decompositions           fp32            input dtype
    cat, stack                            promote         input dtype (torch promotes by itself)
    binary_cross_entropy                  fp32            refused: fp16 leads to log(0)

The CPU lists assume bf16 (fp32's range), the GPU lists fp16 (largest number 65504 < exp(12)).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class OpPolicy:
    """Op names as in torch's dispatcher, without "aten::" and the overload name."""

    low: frozenset[str]
    fp32: frozenset[str]
    promote: frozenset[str]
    refused: frozenset[str] = frozenset()

    def of(self, op: str) -> str:
        """ "low", "fp32", "promote", "refused", or "input dtype"."""
        for name in ("low", "fp32", "promote", "refused"):
            if op in getattr(self, name):
                return name
        return "input dtype"


def _ops(text: str) -> frozenset[str]:
    return frozenset(text.split())


MATMULS = _ops("""
    linear matmul mm bmm addmm addbmm baddbmm linalg_vecdot prelu scaled_dot_product_attention
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d _convolution
""")
# Calls with matmuls inside: torch's autocast sees the matmuls, labkit's mode sees only the call.
CALLS_OF_MATMULS = _ops("chain_matmul linalg_multi_dot linalg_matmul")


LOSSES = _ops("""
    mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div poisson_nll_loss
    nll_loss nll_loss2d nll_loss_nd cross_entropy_loss binary_cross_entropy_with_logits
    cosine_embedding_loss hinge_embedding_loss margin_ranking_loss triplet_margin_loss
    multi_margin_loss multilabel_margin_loss
""")  # nll_loss_nd is nll_loss with any number of dimensions; cross_entropy_loss calls it

CPU = OpPolicy(
    low=MATMULS
    | CALLS_OF_MATMULS
    | _ops("tensordot _addmm_activation mkldnn_rnn_layer _native_multi_head_attention"),
    fp32=LOSSES
    | _ops("""
    binary_cross_entropy ctc_loss multilabel_margin_loss_forward prod trace quantile nanquantile
    cdist polar view_as_complex stft fake_quantize_per_tensor_affine
    avg_pool3d max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d adaptive_max_pool3d
    fractional_max_pool2d fractional_max_pool3d
    grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
    fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2
    fft_rfftn fft_irfftn fft_hfft fft_ihfft
    cholesky cholesky_inverse cholesky_solve inverse pinverse lu_solve orgqr ormqr geqrf qr svd
    triangular_solve _lu_with_info linalg_cond linalg_matrix_rank linalg_solve linalg_cholesky
    linalg_cholesky_ex linalg_svd linalg_svdvals linalg_eig linalg_eigh linalg_eigvals
    linalg_eigvalsh linalg_inv linalg_inv_ex linalg_qr linalg_lstsq linalg_householder_product
    linalg_tensorinv linalg_tensorsolve
    """),
    promote=_ops("cat stack index_copy"),
)

CUDA = OpPolicy(
    low=MATMULS
    | CALLS_OF_MATMULS
    | _ops("""
    mv addmv addr convolution cudnn_convolution cudnn_convolution_transpose
    einsum lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell
    _scaled_dot_product_flash_attention
    """),
    fp32=LOSSES
    | _ops("""
    softmax log_softmax layer_norm native_layer_norm group_norm rms_norm
    exp expm1 log log10 log1p log2 pow reciprocal rsqrt softplus logsumexp
    sum prod cumsum cumprod norm frobenius_norm nuclear_norm linalg_vector_norm linalg_matrix_norm
    linalg_norm pairwise_distance acos asin cosh sinh tan erfinv cosine_similarity dist pdist cdist
    renorm
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
    """),  # linalg_norm and pairwise_distance call linalg_vector_norm
    promote=_ops("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """),
    refused=_ops("binary_cross_entropy"),
)

POLICIES = {"cpu": CPU, "cuda": CUDA}
