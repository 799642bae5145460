"""Stand-ins for the peers' packages: the signatures that the benchmark calls, and plain torch behind them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch


def maxsim(Q, D, doc_lengths=None):
    return (D.float() @ Q.float().T).amax(1).sum(1)


def ragged(Q, D, cu_seqlens_d, max_seqlen_d):
    spans = zip(cu_seqlens_d.tolist(), cu_seqlens_d.tolist()[1:])
    parts = [D[a:b] for a, b in spans]
    assert max(map(len, parts)) <= max_seqlen_d
    return torch.stack([maxsim(Q, part[None])[0] for part in parts])


def quantize_int8(D):
    low, high = D.float().amin(-1, keepdim=True), D.float().amax(-1, keepdim=True)
    scales = (high - low) / 255
    return ((D.float() - low) / scales).round().to(torch.uint8), scales.half(), low.half()


def flash_maxsim_int8(Q, D_uint8, scales, mins, doc_lengths=None):
    return maxsim(Q, D_uint8.float() * scales + mins)


def quantize_int8_symmetric(D):
    scales = D.abs().amax(-1, keepdim=True).float() / 127
    return (D / scales).round().to(torch.int8), scales.half()


def flash_maxsim_int8_symmetric(Q, D_int8, scales, doc_lengths=None):
    return maxsim(Q, D_int8.float() * scales)


def quantize_query_int8(Q):
    scales = Q.abs().amax(-1).float() / 127
    return (Q / scales[:, None]).round().to(torch.int8), scales.half()


def flash_maxsim_int8x8(Q, D_int8, d_scales, Q_int8=None, q_scales=None, doc_lengths=None):
    return maxsim(Q_int8.float() * q_scales[:, None], D_int8.float() * d_scales)


def lik_padded(queries, documents, query_lengths, doc_lengths):
    assert query_lengths.shape == queries.shape[:1]
    assert doc_lengths.shape == documents.shape[:2]
    return maxsim(queries[0], documents[0])[None]


def lik_varlen(Q_packed, D_packed, cu_seqlens_q, cu_seqlens_d, max_seqlen_q, max_seqlen_d):
    assert cu_seqlens_q.tolist() == [0, max_seqlen_q]
    return ragged(Q_packed, D_packed, cu_seqlens_d, max_seqlen_d)[None]


def quantize_fp8_per_token(X):
    scales = X.abs().amax(-1).float() / 448
    return (X.float() / scales[..., None]).to(torch.float8_e4m3fn), scales


def maxsim_inference_fp8(Q, D, *, scale_Q, scale_D):
    return maxsim(Q[0].float() * scale_Q[0, :, None], D.float() * scale_D[..., None])[None]


def decompressed(codes, residuals, centroids, bucket_weights, nbits):
    """Slot s of a byte holds bits [s * nbits, (s + 1) * nbits), as late-interaction-kernels documents."""
    shifts = torch.arange(0, 8, nbits)
    index = (residuals.int()[..., None] >> shifts) & (2**nbits - 1)
    e = centroids[codes.long()].float() + bucket_weights[index.flatten(-2).long()]
    return torch.nn.functional.normalize(e, dim=-1)


def maxsim_residual(Q, codes, residuals, doc_lengths, centroids, bucket_weights, nbits):
    s = decompressed(codes, residuals, centroids, bucket_weights, nbits) @ Q.float().T
    s[torch.arange(codes.size(1)) >= doc_lengths[:, None]] = -torch.inf
    return s.amax(1).sum(1)


def maxsim_residual_varlen(
    Q, codes_flat, residuals_flat, cu_seqlens_d, centroids, bucket_weights, nbits, *, max_seqlen_d
):
    D = decompressed(codes_flat, residuals_flat, centroids, bucket_weights, nbits)
    return ragged(Q, D, cu_seqlens_d, max_seqlen_d)


def plaid_approx_score(query_centroid_scores, codes, doc_lengths):
    s = query_centroid_scores[codes.long()]
    s[torch.arange(codes.size(1)) >= doc_lengths[:, None]] = -torch.inf
    return s.amax(1).sum(1)


MODULES: dict[str, dict[str, Any]] = {
    "flash_maxsim": {
        **dict.fromkeys(
            ("flash_maxsim", "flash_maxsim_qreuse", "flash_maxsim_persistent", "flash_maxsim_splitk"), maxsim
        ),
        "flash_maxsim_batched": lambda Q, D, doc_lengths=None: maxsim(Q[0], D)[None],
        "flash_maxsim_rerank_padded": lambda queries, documents: maxsim(queries[0], documents[0])[None],
        "flash_maxsim_packed": ragged,
        "flash_maxsim_rerank": ragged,
        "quantize_int8": quantize_int8,
        "flash_maxsim_int8": flash_maxsim_int8,
        "quantize_int8_symmetric": quantize_int8_symmetric,
        "flash_maxsim_int8_symmetric": flash_maxsim_int8_symmetric,
        "quantize_query_int8": quantize_query_int8,
        "flash_maxsim_int8x8": flash_maxsim_int8x8,
    },
    "flash_maxsim.flash_maxsim_exp": {"flash_maxsim_heuristic": maxsim},
    "late_interaction_kernels": {"maxsim": maxsim, "maxsim_padded": lik_padded, "maxsim_varlen": lik_varlen},
    "late_interaction_kernels.fp8": {
        "quantize_fp8_per_token": quantize_fp8_per_token,
        "maxsim_inference_fp8": maxsim_inference_fp8,
    },
    "late_interaction_kernels.plaid": {
        "maxsim_residual": maxsim_residual,
        "maxsim_residual_varlen": maxsim_residual_varlen,
        "plaid_approx_score": plaid_approx_score,
    },
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, functions in MODULES.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
