"""Dense MaxSim: padded, packed, pid lists, several queries, every dtype."""

import pytest
import torch
from torch.nn.functional import normalize

from plaid_tilemaxsim.ops import api, dense_kernel, reference, tuning
from tests.ops.ragged import LENGTHS, assert_scores, poisoned

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(1, 1, 64), (1, 32, 128), (3, 5, 96), (2, 33, 40), (1, 130, 64), (1, 32, 384), (5, 32, 128)]


def tolerance(LQ, DIM):
    """Products are exact in fp32 (fp32 inputs: rounded once); DIM additions of terms below 1, each off by 2**-24."""
    return LQ * DIM * 2.0**-24


def make(device, NQ, LQ, DIM, dtype, sign=1.0):
    g = torch.Generator().manual_seed(LQ)
    Q = normalize(torch.randn(NQ, LQ, DIM, generator=g), dim=-1)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    D = normalize(torch.randn(int(offsets[-1]), DIM, generator=g), dim=-1)
    if sign < 0:
        Q, D = Q.abs(), -D.abs()
    return Q.to(device, dtype), D.to(device, dtype), offsets.to(device)


def oracle(Q, D, offsets, pids=None):
    return torch.stack([reference.maxsim(q, D, offsets, pids) for q in Q])


def pad(D, offsets, ND):
    """Padded form, cut at ND tokens, with lengths; the padding is NaN: it must not be read."""
    P = D.new_full((len(LENGTHS), ND, D.size(1)), float("nan"))
    lengths = offsets.diff().clamp(max=ND)
    for p, length in enumerate(lengths.tolist()):
        P[p, :length] = D[offsets[p] : offsets[p] + length]
    return P, lengths


def cut(D, offsets, lengths):
    """Packed form of the first ``lengths`` tokens of each passage."""
    rows = torch.cat([torch.arange(n, device=D.device) + o for n, o in zip(lengths, offsets, strict=False)])
    return D[rows], torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("NQ", "LQ", "DIM"), SHAPES)
def test_packed(NQ, LQ, DIM, dtype, device):
    Q, D, offsets = make(device, NQ, LQ, DIM, dtype)
    want = oracle(Q, D, offsets)
    out = poisoned(NQ * len(LENGTHS), device).view(NQ, -1)
    got = api.dense_maxsim(Q, D, offsets=offsets, out=out, impl="triton")
    assert got.data_ptr() == out.data_ptr()
    for g, w in zip(got, want, strict=True):
        assert_scores(g, w, tolerance(LQ, DIM))
    assert_scores(api.dense_maxsim(Q[0], D, offsets=offsets, impl="triton"), want[0], tolerance(LQ, DIM))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pid_lists_and_count(dtype, device):
    Q, D, offsets = make(device, 1, 8, 64, torch.float16)
    everything = api.dense_maxsim(Q[0], D, offsets=offsets, impl="triton")
    for listed in ([], [5], [13, 0, 5, 5, 15, 1, 5, 12]):
        pids = torch.tensor(listed, dtype=dtype, device=device)
        assert torch.equal(
            api.dense_maxsim(Q[0], D, offsets=offsets, pids=pids, impl="triton"), everything[pids.long()]
        )
    out = torch.full((8,), 7.0, device=device)
    count = torch.tensor([3], dtype=torch.int32, device=device)
    api.dense_maxsim(Q[0], D, offsets=offsets, pids=pids, out=out, count=count, impl="triton")
    assert torch.equal(out[:3], everything[pids[:3].long()])
    assert (out[3:] == 7.0).all()


@pytest.mark.parametrize("ND", [1, 17, 32, 65, 129])
@pytest.mark.parametrize(("NQ", "LQ", "DIM"), [(1, 32, 64), (3, 5, 96)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padded_with_lengths(ND, NQ, LQ, DIM, dtype, device):
    Q, D, offsets = make(device, NQ, LQ, DIM, torch.float16)
    P, lengths = pad(D, offsets, ND)
    want = oracle(Q, *cut(D, offsets, lengths))
    got = api.dense_maxsim(Q, P, lengths=lengths.to(dtype), impl="triton")
    for g, w in zip(got, want, strict=True):
        assert_scores(g, w, tolerance(LQ, DIM))


@pytest.mark.parametrize("ND", [1, 16, 31, 32, 33, 64, 100, 128, 129, 256])
@pytest.mark.parametrize("DIM", [64, 96])
def test_padded_full(ND, DIM, device):
    g = torch.Generator().manual_seed(ND)
    Q = normalize(torch.randn(8, DIM, generator=g), dim=-1).to(device, torch.float16)
    D = normalize(torch.randn(5, ND, DIM, generator=g), dim=-1).to(device, torch.float16)
    want = (D.double() @ Q.double().T).amax(1).sum(1)
    assert_scores(api.dense_maxsim(Q, D, impl="triton"), want, tolerance(8, DIM))


@pytest.mark.parametrize("ND", [16, 40, 128])
@pytest.mark.parametrize(("late", "part"), [(1, 20), (2, 4), (3, 4), (9, 10)])
def test_the_dealing_changes_no_bit(monkeypatch, ND, late, part, device):
    """Runs of 2, 5 and 3 passages beside groups of 4, and of none; of a device's count too."""
    g = torch.Generator().manual_seed(ND)
    Q = normalize(torch.randn(8, 64, generator=g), dim=-1).to(device, torch.float16)
    D = normalize(torch.randn(45, ND, 64, generator=g), dim=-1).to(device, torch.float16)
    lengths = torch.randint(0, ND + 1, (45,), generator=g).to(device)
    want = api.dense_maxsim(Q, D, impl="triton"), api.dense_maxsim(Q, D, lengths=lengths, impl="triton")
    monkeypatch.setattr(tuning, "late_share", lambda n, programs, fixed: (late, part))
    monkeypatch.setattr(dense_kernel, "LEAST_BYTES", 0)
    for counted in (45, 3, 0, -(2**31)):
        count, n = torch.tensor([counted], dtype=torch.int32, device=device), max(counted, 0)
        for given, expected in zip((None, lengths), want, strict=True):
            out = poisoned(45, device)
            api.dense_maxsim(Q, D, lengths=given, out=out, count=None if n == 45 else count, impl="triton")
            assert torch.equal(out[:n], expected[:n])
            assert out[n:].isnan().all()


def test_negative_similarities_are_not_clamped(device):
    Q, D, offsets = make(device, 1, 8, 64, torch.float16, sign=-1.0)
    want = oracle(Q, D, offsets)[0]
    assert (want[1:-1] < 0).all()
    assert_scores(api.dense_maxsim(Q[0], D, offsets=offsets, impl="triton"), want, tolerance(8, 64))
    P, lengths = pad(D, offsets, 129)
    assert_scores(api.dense_maxsim(Q[0], P, lengths=lengths, impl="triton"), want, tolerance(8, 64))


def test_no_passages_and_no_tokens(device):
    Q = torch.randn(4, 64, device=device).half()
    assert api.dense_maxsim(Q, Q.new_empty(0, 16, 64), impl="triton").shape == (0,)
    assert api.dense_maxsim(Q, Q.new_empty(3, 0, 64), impl="triton").isneginf().all()
    offsets = torch.zeros(4, dtype=torch.int64, device=device)
    assert api.dense_maxsim(Q, Q.new_empty(0, 64), offsets=offsets, impl="triton").isneginf().all()


def test_longest_passage(device):
    """65,535 tokens, the best of each query token at the very end."""
    Q = torch.eye(16, 64, device=device, dtype=torch.float16)
    D = torch.zeros(65535, 64, device=device, dtype=torch.float16)
    D[-16:, :16] = torch.eye(16)
    offsets = torch.tensor([0, 65535], device=device)
    if device == "cpu":  # the interpreter takes minutes for the whole passage: keep its last tiles
        D, offsets = D[-135:], torch.tensor([0, 135])
    assert api.dense_maxsim(Q, D.contiguous(), offsets=offsets, impl="triton").tolist() == [16.0]


def test_element_addresses_past_int32(device):
    """Rows beyond element 2**31. Memory is reserved, not touched."""
    first = 2**24 + 5
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB of GPU memory")
    Q, D, offsets = make(device, 1, 32, 128, torch.float16)
    want = api.dense_maxsim(Q[0], D, offsets=offsets, impl="triton")
    big = torch.empty(first + len(D), 128, dtype=torch.float16, device=device)
    big[first:] = D
    offsets = torch.cat([offsets.new_zeros(1), offsets + first])
    pids = torch.arange(1, len(LENGTHS) + 1, device=device)
    assert torch.equal(api.dense_maxsim(Q[0], big, offsets=offsets, pids=pids, impl="triton"), want)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "relative"), [("ieee", 2.0**-23), ("tf32x3", 2.0**-20), ("tf32", 2.0**-10)])
def test_fp32_precisions(precision, relative):
    Q, D, offsets = make("cuda", 1, 32, 128, torch.float32)
    got = api.dense_maxsim(Q[0], D, offsets=offsets, precision=precision, impl="triton")
    # both operands round by `relative` at most, over unit vectors
    assert_scores(got, oracle(Q, D, offsets)[0], tolerance(32, 128) + 32 * 2 * relative)
