"""The boundary: what it refuses, how it says so, what it chooses."""

import os
import re
import subprocess
import sys

import pytest
import torch

from plaid_tilemaxsim.ops import api, tuning
from tests.ops.ragged import make_collection, make_pq


@pytest.fixture
def c():
    return make_collection("cpu", 5, 64)


@pytest.fixture
def cs():
    """The kernel's form, for calls that fail before they compute."""
    return api.CentroidScores(
        torch.zeros(151, 16, dtype=torch.int16), torch.ones(1), 5, torch.ones(150, dtype=torch.uint8)
    )


def residual_arguments(c, cs):
    return {
        "Q": c.Q, "cs": cs, "codes": c.codes, "residuals": c.residuals, "inv_norms": c.inv_norms, "inv_norm_lo": 0.0,
        "inv_norm_step": 1.0, "bucket_weights": c.bucket_weights, "nbits": c.nbits, "offsets": c.offsets,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Q": torch.zeros(5)}, "Q.shape: expected [*, *], got [5]"),
        ({"Q": torch.zeros(5, 64).half()}, "Q.dtype: expected torch.float32, got torch.float16"),
        ({"Q": torch.zeros(0, 64)}, "LQ: expected 1..1024 query tokens, got 0"),
        ({"Q": torch.zeros(1025, 64)}, "LQ: expected 1..1024 query tokens, got 1025"),
        ({"Q": torch.zeros(64, 5).T}, "Q: expected contiguous"),
        ({"Q": torch.zeros(5, 96)}, "centroids.shape: expected [*, 96], got [150, 64]"),
        ({"centroids": torch.zeros(150, 64).double()}, "centroids.dtype: expected torch.float16 or torch.float32"),
        ({"threshold": float("nan")}, "threshold: expected None or finite, got nan"),
        ({"cmax": -1.0}, "cmax: expected None or finite, >= 0, got -1.0"),
        ({"ncells": 0}, "ncells: expected None or 1..128, got 0"),
        ({"impl": "cuda"}, "impl: expected ('auto', 'triton', 'torch', 'reference'), got cuda"),
    ],
)
def test_centroid_scores_refuses(c, change, message):
    arguments = {"Q": c.Q, "centroids": c.centroids, "impl": "triton"} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        api.centroid_scores(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(3).long()}, "codes.dtype: expected torch.int32, got torch.int64"),
        ({"offsets": torch.zeros(3).int()}, "offsets.dtype: expected torch.int64, got torch.int32"),
        ({"offsets": torch.zeros(0).long()}, "offsets: expected [N + 1], got [0]"),
        ({"pids": torch.zeros(2)}, "pids.dtype: expected torch.int32 or torch.int64, got torch.float32"),
        ({"pids": torch.zeros(2, 2).int()}, "pids.shape: expected [*], got [2, 2]"),
        ({"pids": torch.zeros(2).int(), "out": torch.zeros(3)}, "out.shape: expected [2], got [3]"),
        ({"count": torch.zeros(1).long()}, "count.dtype: expected torch.int32, got torch.int64"),
        ({"count": torch.zeros(2).int()}, "count.shape: expected [1], got [2]"),
    ],
)
def test_centroid_maxsim_refuses(c, cs, change, message):
    arguments = {"cs": cs, "codes": c.codes, "offsets": c.offsets, "impl": "triton"} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        api.centroid_maxsim(**arguments)


def test_kernels_need_their_own_forms(device):
    c = make_collection(device, 5, 64)
    with pytest.raises(ValueError, match=r"centroids.dtype: expected torch.float16, got torch.float32"):
        api.centroid_scores(c.Q, c.centroids.float(), impl="triton")
    with pytest.raises(ValueError, match="use_keep: expected centroid scores made with a threshold"):
        api.centroid_maxsim(c.centroid_scores(), c.codes, c.offsets, use_keep=True, impl="triton")
    fp32 = api.centroid_scores(c.Q, c.centroids, impl="reference")
    with pytest.raises(ValueError, match=r"cs.table.shape: expected \[\*, 16\], got \[150, 5\]"):
        api.centroid_maxsim(fp32, c.codes, c.offsets, impl="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Q": torch.zeros(4, 64)}, "Q.shape: expected [5, *], got [4, 64]"),
        ({"nbits": 3}, "nbits: expected 1, 2, 4 or 8, got 3"),
        ({"nbits": 4}, "residuals.shape: expected [723, 32], got [723, 16]"),
        ({"residuals": torch.zeros(723, 16).char()}, "residuals.dtype: expected torch.uint8, got torch.int8"),
        ({"inv_norms": torch.zeros(722)}, "inv_norms.shape: expected [723], got [722]"),
        ({"inv_norms": torch.zeros(723).half()}, "inv_norms.dtype: expected torch.uint16 or torch.float32"),
        ({"bucket_weights": torch.zeros(2)}, "bucket_weights.shape: expected [4], got [2]"),
        ({"pids": torch.zeros(2).int(), "out": torch.zeros(2).half()}, "out.dtype: expected torch.float32"),
    ],
)
def test_residual_maxsim_refuses(c, cs, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        api.residual_maxsim(**(residual_arguments(c, cs) | change), impl="triton")


@pytest.mark.parametrize(("nbits", "DIM", "nbytes"), [(2, 128, 8), (4, 64, 8), (1, 64, 2)])
def test_residuals_that_vector_loads_cannot_read_are_refused(nbits, DIM, nbytes, monkeypatch):
    monkeypatch.setattr(tuning, "residual_is_fast", lambda *shape: True)
    c = make_collection("cpu", 5, DIM, nbits)
    stored = torch.cat([torch.zeros(1, dtype=torch.uint8), c.residuals.flatten()])
    arguments = residual_arguments(c, c.centroid_scores()) | {"residuals": stored[1:].view_as(c.residuals)}
    message = f"residuals: expected an address that is a multiple of {nbytes} bytes, got one 1 bytes past it"
    with pytest.raises(ValueError, match=message):
        api.residual_maxsim(**arguments, impl="triton")


def test_pq_codes_that_vector_loads_cannot_read_are_refused(monkeypatch):
    monkeypatch.setattr(tuning, "pq_is_fast", lambda *shape: True)
    Q, codes, codebook, offsets = make_pq("cpu", 1, 5, 64, 16)
    stored = torch.cat([codes.new_zeros(2), codes.flatten()])[2:].view_as(codes)
    message = "codes: expected an address that is a multiple of 4 bytes, got one 2 bytes past it"
    with pytest.raises(ValueError, match=message):
        api.pq_maxsim(Q, stored, codebook, offsets, impl="triton")


@pytest.mark.parametrize(
    ("D", "change", "message"),
    [
        (torch.zeros(9, 64), {"Q": torch.zeros(64)}, "Q: expected [LQ, DIM] or [NQ, LQ, DIM], got [64]"),
        (torch.zeros(9, 64), {}, "D (without offsets: padded).shape: expected [*, *, 64], got [9, 64]"),
        (torch.zeros(2, 9, 64).half(), {}, "D (without offsets: padded).dtype: expected torch.float32"),
        (torch.zeros(2, 9, 64), {"lengths": torch.zeros(3).int()}, "lengths.shape: expected [2], got [3]"),
        (torch.zeros(2, 9, 64), {"pids": torch.zeros(3).int()}, "pids: expected None for padded D"),
        (
            torch.zeros(2, 9, 64),
            {"precision": "fp16"},
            "precision: expected ('tf32x3', 'fp16x3', 'ieee', 'tf32'), got fp16",
        ),
        (torch.zeros(2, 9, 64), {"out": torch.zeros(1, 2)}, "out.shape: expected [2], got [1, 2]"),
    ],
)
def test_dense_maxsim_refuses(D, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        api.dense_maxsim(**({"Q": torch.zeros(4, 64), "D": D, "impl": "triton"} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Q": torch.zeros(64)}, "Q: expected [LQ, DIM] or [NQ, LQ, DIM], got [64]"),
        ({"Q": torch.zeros(4, 64).half()}, "Q.dtype: expected torch.float32, got torch.float16"),
        ({"Q": torch.zeros(0, 4, 64)}, "NQ: expected at least 1, got 0"),
        ({"Q": torch.zeros(4, 60)}, "codes.shape: expected [*, M] with M dividing DIM 60, got [9, 8]"),
        ({"codes": torch.zeros(9, 8).int()}, "codes.dtype: expected torch.uint8, got torch.int32"),
        ({"codes": torch.zeros(9, 0).byte()}, "codes.shape: expected [*, M] with M dividing DIM 64, got [9, 0]"),
        ({"codebook": torch.zeros(8, 256, 4).half()}, "codebook.shape: expected [8, 256, 8], got [8, 256, 4]"),
        ({"codebook": torch.zeros(8, 256, 8)}, "codebook.dtype: expected torch.float16, got torch.float32"),
        ({"offsets": torch.zeros(3).int()}, "offsets.dtype: expected torch.int64, got torch.int32"),
        ({"pids": torch.zeros(2)}, "pids.dtype: expected torch.int32 or torch.int64, got torch.float32"),
        ({"out": torch.zeros(1, 2)}, "out.shape: expected [2], got [1, 2]"),
        ({"Q": torch.zeros(3, 4, 64), "out": torch.zeros(2)}, "out.shape: expected [3, 2], got [2]"),
    ],
)
def test_pq_maxsim_refuses(change, message):
    arguments = {
        "Q": torch.zeros(4, 64), "codes": torch.zeros(9, 8).byte(), "codebook": torch.zeros(8, 256, 8).half(),
        "offsets": torch.tensor([0, 4, 9]),
    }  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(message)):
        api.pq_maxsim(**(arguments | change), impl="triton")


def test_cpu_tensors_choose_torch(c):
    cs = api.centroid_scores(c.Q, c.centroids, 0.2)
    assert cs.table.dtype == torch.float32
    want = api.residual_maxsim(**residual_arguments(c, cs), impl="reference")
    assert torch.allclose(api.residual_maxsim(**residual_arguments(c, cs)), want, atol=1e-5)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_count_on_the_cpu(c, impl):
    cs = api.centroid_scores(c.Q, c.centroids, 0.2, impl=impl)
    pids = torch.tensor([4, 5, 6, 7], dtype=torch.int32)
    count = torch.tensor([2], dtype=torch.int32)
    for run in (
        lambda **kwargs: api.centroid_maxsim(cs, c.codes, c.offsets, pids, impl=impl, **kwargs),
        lambda **kwargs: api.residual_maxsim(**residual_arguments(c, cs), pids=pids, impl=impl, **kwargs),
    ):
        out = torch.full((4,), 7.0)
        run(out=out, count=count)
        assert torch.equal(out[:2], run()[:2])
        assert (out[2:] == 7.0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pids": torch.tensor([3, 16])}, IndexError, "pids: expected 0..15, got 16"),
        ({"pids": torch.tensor([3, -1])}, IndexError, "pids: expected 0..15, got -1"),
        ({"offsets": torch.tensor([0, 724])}, ValueError, "offsets: expected 0..723, got 724"),
        ({"Q": torch.full((5, 64), torch.inf)}, ValueError, "Q: expected finite values"),
    ],
)
def test_what_lies_on_the_cpu_is_looked_at(c, change, error, message):
    cs = api.centroid_scores(c.Q, c.centroids)
    arguments = residual_arguments(c, cs) | change
    n = len(arguments.get("pids", arguments["offsets"][1:]))
    out = torch.full((n,), 7.0)
    with pytest.raises(error, match=re.escape(message)):
        api.residual_maxsim(**arguments, out=out)
    assert (out == 7.0).all()
    # what is not asked for is not looked at
    if "pids" in change:
        api.residual_maxsim(**arguments, count=torch.ones(1, dtype=torch.int32))


def test_lengths_on_the_cpu_are_looked_at():
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=re.escape(f"lengths: expected 0..3, got {bad}")):
            api.dense_maxsim(torch.ones(1, 8), torch.ones(2, 3, 8), lengths=torch.tensor([0, bad]))


@pytest.mark.parametrize("impl", ["torch", "reference", "triton"])
def test_without_tokens_count_holds_too(impl, device):
    if impl == "torch" and device == "cuda":
        pytest.skip("for CPU tensors")
    Q, offsets, codes = (
        torch.ones(2, 64, device=device),
        torch.zeros(5, dtype=torch.int64, device=device),
        torch.zeros(0, 8),
    )
    for count, taken in ((2, 2), (-1, 0), (9, 4)):
        counted = torch.tensor([count], dtype=torch.int32, device=device)
        for run in (
            lambda **kw: api.dense_maxsim(Q, torch.zeros(0, 64, device=device), **kw),
            lambda **kw: api.pq_maxsim(Q, codes.byte().to(device), torch.zeros(8, 256, 8).half().to(device), **kw),
        ):
            out = torch.full((4,), 7.0, device=device)
            run(offsets=offsets, out=out, count=counted, impl=impl)
            assert out.tolist() == [-torch.inf] * taken + [7.0] * (4 - taken)


def test_a_query_with_a_gradient_is_taken(c):
    Q = c.Q.requires_grad_()
    cs = api.centroid_scores(Q, c.centroids, 0.1)
    scores = api.residual_maxsim(**residual_arguments(c, cs) | {"Q": Q})
    assert not scores.requires_grad
    assert torch.equal(scores, api.residual_maxsim(**residual_arguments(c, cs) | {"Q": Q.detach()}))


def test_precision_is_ignored_but_for_fp32(device):
    Q, D = torch.randn(2, 64, device=device).half(), torch.randn(3, 5, 64, device=device).half()
    scores = [api.dense_maxsim(Q, D, precision=precision, impl="triton") for precision in api.PRECISIONS]
    assert all(torch.equal(scores[0], other) for other in scores)


def test_importing_ops_imports_no_triton():
    code = "import sys, plaid_tilemaxsim.ops.api, plaid_tilemaxsim.ops.cpu; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_triton_on_the_cpu_needs_the_interpreter():
    code = (
        "import torch; from plaid_tilemaxsim.ops import api\n"
        "try: api.dense_maxsim(torch.zeros(1, 64), torch.zeros(1, 1, 64), impl='triton')\n"
        "except ValueError as e: print(e)"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert 'device for impl="triton": expected cuda (cpu only under TRITON_INTERPRET=1), got cpu' in done.stdout
