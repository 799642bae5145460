"""Decompression against the oracle: consecutive rows, and passages into padded slots."""

from typing import Any

import pytest
import torch

from plaid_tilemaxsim.ops import decompress_kernel, reference
from tests.ops.ragged import LENGTHS, U16, Collection, make_collection

SHAPES = [(64, 1), (128, 2), (96, 2), (96, 4), (64, 8), (384, 2)]


def parts(c: Collection) -> dict[str, Any]:
    names = ("codes", "residuals", "centroids", "bucket_weights", "nbits")
    return {name: getattr(c, name) for name in names}


def oracle(c: Collection) -> torch.Tensor:
    return reference.decompress(**parts(c)).cpu()


def assert_embeddings(got: torch.Tensor, want: torch.Tensor) -> None:
    """Norm and quotient round by DIM * 2**-24 at worst, the result to its own type (fp16: or by half a subnormal)."""
    relative = want.size(1) * 2.0**-24 + (U16 if got.dtype == torch.float16 else 0)
    tolerance = relative * want.abs() + 2.0**-25
    assert ((got.double().cpu() - want).abs() <= tolerance).all()
    assert ((got.double().cpu().roll(1, 0) - want).abs() > tolerance).any(), "rows in another order would pass"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("DIM", "nbits"), SHAPES)
def test_rows(DIM, nbits, dtype, device):
    c = make_collection(device, 1, DIM, nbits, lengths=(77,))
    out = torch.full((78, DIM), torch.nan, dtype=dtype, device=device)
    decompress_kernel.decompress(**parts(c), out=out[:77])
    assert_embeddings(out[:77], oracle(c))
    assert out[77].isnan().all()
    decompress_kernel.decompress(**parts(c) | {"codes": c.codes[:0], "residuals": c.residuals[:0]}, out=out[:0])


@pytest.mark.parametrize(("first", "rows", "count"), [(0, 7, None), (3, 5, None), (0, 9, 4), (4, 5, 6), (4, 5, 2)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_passages(first, rows, count, dtype, device):
    c = make_collection(device, 1, 96, 2)
    pids = torch.tensor([13, 0, 5, 5, 15, 1, 12, 3, 4], dtype=dtype, device=device)
    ND = max(LENGTHS) + 3
    out = torch.full((rows, ND, 96), torch.nan, dtype=torch.float16, device=device)
    lengths = torch.full((rows,), -7, dtype=torch.int32, device=device)
    left = torch.full((1,), -7, dtype=torch.int32, device=device)
    counted = None if count is None else torch.tensor([count], dtype=torch.int32, device=device)
    decompress_kernel.decompress_passages(
        **parts(c), offsets=c.offsets, pids=pids, count=counted, first=first, out=out, lengths=lengths, left=left
    )
    n = rows if count is None else max(0, min(rows, count - first))
    assert left.item() == n
    want, offsets = oracle(c), c.offsets.tolist()
    for i in range(rows):
        pid = int(pids[first + i])
        length = LENGTHS[pid] if i < n else 0
        assert lengths[i] == (length if i < n else -7)
        assert out[i, length:].isnan().all()
        if length > 1:
            assert_embeddings(out[i, :length], want[offsets[pid] : offsets[pid + 1]])


def test_every_passage_in_order(device):
    c = make_collection(device, 1, 64, 1)
    ND, R = max(LENGTHS), 6
    out = torch.empty(R, ND, 64, dtype=torch.float32, device=device)
    lengths, left = (torch.empty(n, dtype=torch.int32, device=device) for n in (R, 1))
    want = oracle(c)
    for first in range(0, len(LENGTHS), R):
        rows = min(R, len(LENGTHS) - first)
        decompress_kernel.decompress_passages(
            **parts(c),
            offsets=c.offsets,
            pids=None,
            count=None,
            first=first,
            out=out[:rows],
            lengths=lengths,
            left=left,
        )
        assert left.item() == rows
        assert lengths[:rows].tolist() == list(LENGTHS[first : first + rows])
        got = torch.cat([out[i, : LENGTHS[first + i]] for i in range(rows)])
        assert_embeddings(got, want[int(c.offsets[first]) : int(c.offsets[first + rows])])


def test_a_zero_vector_stays_zero(device):
    zeros = torch.zeros(1, 64, dtype=torch.float16, device=device)
    codes, residuals = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, 16, dtype=torch.uint8)
    out = torch.full((1, 64), torch.nan, device=device)
    decompress_kernel.decompress(codes, residuals.to(device), zeros, torch.zeros(4, device=device), 2, out)
    assert (out == 0).all()


def test_element_addresses_past_int32(device):
    """Residual rows beyond byte 2**31. Memory is reserved, not touched."""
    first = 2**26 + 5
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB of GPU memory")
    c = make_collection(device, 1, 128, 2, lengths=(40, 7))
    residuals = torch.empty(first + 47, 32, dtype=torch.uint8, device=device)
    codes = torch.empty(first + 47, dtype=torch.int32, device=device)
    residuals[first:], codes[first:] = c.residuals, c.codes
    out = torch.empty(2, 40, 128, dtype=torch.float32, device=device)
    lengths, left = (torch.empty(n, dtype=torch.int32, device=device) for n in (2, 1))
    decompress_kernel.decompress_passages(
        codes, residuals, c.centroids, c.bucket_weights, 2, c.offsets + first, None, None, 0, out, lengths, left
    )
    assert_embeddings(torch.cat([out[0], out[1, :7]]), oracle(c))
