"""load_resident: the index unchanged, inverse norms within their bound, nothing unchecked on any path."""

from __future__ import annotations

import gc
import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plaid_tilemaxsim.index import placement, resident
from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.placement import describe, plan, plan_for
from plaid_tilemaxsim.index.resident import (
    INV_NORM_ERROR,
    ResidentIndex,
    byte_table,
    load_resident,
    quantised_inverse_norms,
)
from plaid_tilemaxsim.index.transfer import STAGE_BYTES, copy_staged, pin
from plaid_tilemaxsim.ops.reference import decode_residuals
from tests.synthetic import make_index

N, C = 300, 40
SHAPES = [(64, 1), (128, 2), (96, 2), (96, 4), (64, 8), (384, 2)]
# fp32 rounding of a sum of DIM squares, its root and quotient.
FP32_ERROR = 4e-7


def make(path: Path, dim: int = 64, nbits: int = 2) -> PlaidIndex:
    return read_index(make_index(path, n=N, dim=dim, nbits=nbits, C=C, empty=0.1))


def exact_norms(index: PlaidIndex) -> Tensor:
    weights = decode_residuals(index.residuals(), index.nbits, index.bucket_weights, torch.float64)
    return (index.centroids[index.codes().long()].double() + weights).norm(dim=1)


def check_resident(got: ResidentIndex, index: PlaidIndex) -> None:
    expected = {
        "codes": index.codes(),
        "residuals": index.residuals(),
        "offsets": index.offsets,
        "ivf_pids": index.ivf_pids,
        "ivf_offsets": index.ivf_offsets,
        "bucket_weights": index.bucket_weights,
        "centroids": index.centroids.to(got.centroids.dtype),
    }
    for name, tensor in expected.items():
        value = getattr(got, name)
        assert value.dtype == tensor.dtype, name
        assert value.is_contiguous(), name
        assert torch.equal(value.cpu(), tensor), name
    assert (got.dim, got.nbits, got.longest) == (index.dim, index.nbits, int(index.doclens.max()))
    counts = (got.num_passages, got.num_tokens, got.num_centroids)
    assert counts == (index.num_passages, index.num_tokens, index.num_centroids)
    assert got.inv_norms is not None
    inverse = got.inv_norm_lo + got.inv_norm_step * got.inv_norms.cpu().double()
    error = (inverse * exact_norms(index) - 1).abs().max()
    assert error <= FP32_ERROR + (INV_NORM_ERROR if got.inv_norms.dtype == torch.uint16 else 0)


@pytest.mark.parametrize(("dim", "nbits"), SHAPES)
def test_cpu(tmp_path: Path, dim: int, nbits: int) -> None:
    index = make(tmp_path / "i", dim, nbits)
    got = load_resident(index, "cpu", progress=False)
    check_resident(got, index)
    assert (got.placement, got.inv_norm_lo, got.inv_norm_step) == ("cpu", 0.0, 1.0)
    assert got.centroids.dtype == got.inv_norms.dtype == torch.float32
    assert got.device_bytes == sum(t.nbytes for t in vars(got).values() if isinstance(t, Tensor))


def test_the_check_of_norms_would_see_another_bit_order(tmp_path: Path) -> None:
    """The oracle of these tests does not accept slots read from the low bits, as some decoders do."""
    index = make(tmp_path / "i")
    got = load_resident(index, "cpu", progress=False)
    low_first = byte_table(2, index.bucket_weights).flip(1)
    got.inv_norms = resident.inverse_norms(got.codes, got.residuals, got.centroids, low_first)
    with pytest.raises(AssertionError):
        check_resident(got, index)


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_byte_table(nbits: int) -> None:
    weights = torch.randn(2**nbits)
    every_byte = torch.arange(256, dtype=torch.uint8)[:, None]
    assert torch.equal(byte_table(nbits, weights), decode_residuals(every_byte, nbits, weights, torch.float32))


def test_one_centroid(tmp_path: Path) -> None:
    index = read_index(make_index(tmp_path / "i", n=5, C=1, empty=0))
    check_resident(load_resident(index, "cpu", progress=False), index)


def test_a_cpu_copy_survives_a_rewrite_of_the_files(tmp_path: Path) -> None:
    index = make(tmp_path / "i")
    got = load_resident(index, "cpu", progress=False)
    before = {name: value.clone() for name, value in vars(got).items() if isinstance(value, Tensor)}
    for file in (tmp_path / "i").iterdir():
        file.write_bytes(b"")
    for name, value in before.items():
        assert torch.equal(getattr(got, name), value), name


def test_an_index_larger_than_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resident, "available_memory", lambda: 1000)
    chunks = make(tmp_path / "i")
    with pytest.raises(RuntimeError, match=r"expected twice the .* bytes of an index in 3 chunks, got 1000"):
        load_resident(chunks, "cpu", progress=False)
    single = read_index(make_index(tmp_path / "j", n=50, chunk_size=50))
    with caplog.at_level(logging.WARNING, "plaid_tilemaxsim"):
        got = load_resident(single, "cpu", progress=False)
    assert got.residuals.data_ptr() == single.residuals().data_ptr()
    assert "stay in the files" in caplog.text
    check_resident(got, single)


def test_contents_are_checked_after_a_reading_that_did_not(tmp_path: Path) -> None:
    folder = make_index(tmp_path / "i", n=N, C=C)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    codes = torch.load(copy / "1.codes.pt", weights_only=True)
    codes[3] = C
    torch.save(codes, copy / "1.codes.pt")
    with pytest.raises(ValueError, match=r"1\.codes\.pt: codes: expected values in \[0, 40\), got 40 at position 3"):
        load_resident(read_index(copy, verify="structure"), "cpu")
    ivf, lengths = torch.load(folder / "ivf.pid.pt", weights_only=True)
    torch.save((ivf.flip(0), lengths), folder / "ivf.pid.pt")
    with pytest.raises(ValueError, match=r"ivf\.pid\.pt: pids of centroid 0: expected a strictly ascending list"):
        load_resident(read_index(folder, verify="structure"), "cpu")


def test_no_inference_tensors(tmp_path: Path) -> None:
    index = make(tmp_path / "i")
    with torch.inference_mode():
        got = load_resident(index, "cpu", progress=False)
    assert not any(value.is_inference() for value in vars(got).values() if isinstance(value, Tensor))


def test_arguments(tmp_path: Path) -> None:
    index = make(tmp_path / "i")
    with pytest.raises(ValueError, match=r"placement: expected one of .*, got 'tape'"):
        load_resident(index, "cpu", "tape")
    for where in ("gpu", "disk"):
        with pytest.raises(ValueError, match=f'"auto" or "host" on the CPU, got {where!r}'):
            load_resident(index, "cpu", where)
    with pytest.raises(ValueError, match="expected cpu or cuda, got meta"):
        load_resident(index, "meta")


# Inverse norms in 16 bits.


def quantised(index: PlaidIndex) -> tuple[Tensor, float, float]:
    return quantised_inverse_norms(index.codes(), index.residuals(), index.centroids, index.bucket_weights, index.nbits)


@pytest.mark.parametrize(("dim", "nbits"), SHAPES)
def test_quantised(tmp_path: Path, dim: int, nbits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "NORM_TOKENS", 1000)
    index = make(tmp_path / "i", dim, nbits)
    stored, low, step = quantised(index)
    assert stored.dtype == torch.uint16
    assert {int(stored.int().min()), int(stored.int().max())} == {0, 65535}
    error = ((low + step * stored.double()) * exact_norms(index) - 1).abs().max()
    assert error <= step / 2 / low + FP32_ERROR <= INV_NORM_ERROR + FP32_ERROR


def two_norms(norms: list[float]) -> tuple[Tensor, float, float]:
    """16 dims whose bucket weights are 0: the norms are those of the centroids, one token each."""
    centroids = torch.zeros(len(norms), 16)
    centroids[:, 3] = torch.tensor(norms)
    codes = torch.arange(len(norms), dtype=torch.int32)
    residuals = torch.zeros(len(norms), 2, dtype=torch.uint8)
    return quantised_inverse_norms(codes, residuals, centroids, torch.zeros(2), 1)


def test_a_range_too_wide_for_16_bits_stays_in_fp32() -> None:
    assert two_norms([0.5, 1.0])[0].dtype == torch.uint16
    stored, low, step = two_norms([0.25, 1.0])
    assert (stored.dtype, stored.tolist(), low, step) == (torch.float32, [4.0, 1.0], 0.0, 1.0)


def test_a_zero_vector_has_inverse_norm_zero() -> None:
    stored, low, step = two_norms([0.0, 1.0, 2.0])
    assert (low + step * stored.float()).tolist() == [0.0, 1.0, 0.5]


def test_equal_norms_and_no_tokens() -> None:
    stored, low, step = two_norms([2.0, 2.0])
    assert (low + step * stored.float()).tolist() == [0.5, 0.5]
    assert two_norms([])[0].numel() == 0


# Copies and the plan.


def test_copies_in_pieces() -> None:
    sources = [torch.arange(3 * STAGE_BYTES // 4 + 5, dtype=torch.int32), torch.empty(0, 7), torch.rand(5, 3)]
    targets = [torch.full_like(source, -1) for source in sources]
    with resident._bar(sum(source.nbytes for source in sources), "copy", progress=False) as bar:
        copy_staged(list(zip(sources, targets, strict=True)), bar)
    assert all(map(torch.equal, sources, targets))


class Driver:
    """Stands for the CUDA runtime: notes calls, returns a status."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append((address,))
        return 0


def test_memory_is_unpinned_when_its_tensor_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    tensor = torch.empty(10, 3)
    address = tensor.data_ptr()
    pin(tensor)
    assert driver.calls == [(address, 120, 0)]
    del tensor
    gc.collect()
    assert driver.calls == [(address, 120, 0), (address,)]
    pin(torch.empty(0, 3))
    assert len(driver.calls) == 2


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(status=2))
    with pytest.raises(RuntimeError, match="expected 120 bytes that can be pinned, got CUDA error 2"):
        pin(torch.empty(10, 3))


def test_plan_counts_every_tensor_of_a_resident_index(tmp_path: Path) -> None:
    index = make(tmp_path / "i", 128, 2)
    got = load_resident(index, "cpu", progress=False)
    # On a GPU centroids are fp16 and inverse norms uint16.
    on_gpu = got.device_bytes - got.centroids.nbytes // 2 - got.inv_norms.nbytes // 2 - got.bucket_weights.nbytes
    gpu, host = plan_for(index, "gpu"), plan_for(index, "host")
    assert gpu.device_bytes - gpu.device["workspace"] == on_gpu
    assert host.device_bytes == gpu.device_bytes - host.host_bytes
    assert (gpu.host_bytes, host.host_bytes) == (0, got.residuals.nbytes + got.ivf_pids.nbytes)


def test_plan_by_free_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    index = make(tmp_path / "i", 128, 2)
    gpu, host = (plan_for(index, name).device_bytes for name in ("gpu", "host"))
    with caplog.at_level(logging.INFO, "plaid_tilemaxsim"):
        assert plan(index, gpu).placement == "gpu"
    assert caplog.text.count("placement gpu") == 1
    assert plan(index, gpu - 1).placement == "host"
    assert plan(index, gpu, "host").placement == "host"
    with pytest.raises(RuntimeError, match=r"expected .* \(gpu\), got .* free; placement \"host\" would fit"):
        plan(index, gpu - 1, "gpu")
    with pytest.raises(RuntimeError, match=r"expected .* \(gpu\) or .* \(host\) or .* \(disk\), got .* free$"):
        plan(index, host - 1)
    with pytest.raises(ValueError, match="placement: expected one of"):
        plan(index, gpu, "tape")
    monkeypatch.setattr("plaid_tilemaxsim.index.placement.available_memory", lambda: 1000)
    assert plan(index, gpu - 1).placement == "disk"  # what would be pinned does not fit the host
    with pytest.raises(RuntimeError, match=r"host memory: expected .* pinned, .*; placement \"gpu\" would fit"):
        plan(index, gpu, "host")


def test_describe(tmp_path: Path) -> None:
    folder = make_index(tmp_path / "i", n=N, dim=96, nbits=4, C=C, empty=0.1)
    index = read_index(folder)
    text, problems = describe(folder)
    assert not problems
    assert "plan.json" not in text
    (folder / "plan.json").unlink()
    assert "plan.json" in describe(folder, "full")[0]
    for part in (
        str(folder),
        "96 dimensions, 4 bits each",
        f"300 in 3 chunks, {int((index.doclens == 0).sum())} of them empty",
        f"{index.num_tokens:,}",
        f"{index.nbytes:,} = residuals",
        f"max {int(index.doclens.max())}",
        "1 empty lists",
        "plan gpu",
        "plan host",
    ):
        assert part in text, part
    assert all(f"{unit} " in placement._size(count) + " " for unit, count in (("B", 9), ("KiB", 9000), ("GiB", 2**31)))
    with pytest.raises(ValueError, match=r"metadata\.json: file"):
        describe(tmp_path)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["gpu", "host"])
@pytest.mark.parametrize(("dim", "nbits"), SHAPES)
def test_cuda(tmp_path: Path, dim: int, nbits: int, where: str) -> None:
    index = make(tmp_path / "i", dim, nbits)
    got = load_resident(index, "cuda", where, progress=False)
    check_resident(got, index)
    assert (got.placement, got.centroids.dtype, got.inv_norms.dtype) == (where, torch.float16, torch.uint16)
    for name, value in vars(got).items():
        if isinstance(value, Tensor):
            assert value.is_cuda == (name not in ("residuals", "ivf_pids") or where == "gpu"), name
    assert got.residuals.is_pinned() == (where == "host")
    planned = plan_for(index, where)
    assert got.device_bytes - got.bucket_weights.nbytes == planned.device_bytes - planned.device["workspace"]


@pytest.mark.gpu
def test_cuda_auto_is_gpu_when_it_fits(tmp_path: Path) -> None:
    assert load_resident(make(tmp_path / "i"), "cuda", progress=False).placement == "gpu"


@pytest.mark.gpu
def test_cuda_contents_are_checked_on_the_device(tmp_path: Path) -> None:
    folder = make_index(tmp_path / "i", n=N, C=C)
    codes = torch.load(folder / "1.codes.pt", weights_only=True)
    codes[3] = 2**31 - 1
    torch.save(codes, folder / "1.codes.pt")
    with pytest.raises(ValueError, match=r"1\.codes\.pt: codes: expected values in \[0, 40\), got 2147483647"):
        load_resident(read_index(folder, verify="structure"), "cuda", progress=False)
    # No device-side assertion: the context still works.
    assert int(torch.ones(3, device="cuda").sum()) == 3


@pytest.mark.gpu
def test_cuda_staging_of_more_than_all_buffers(tmp_path: Path) -> None:
    source = torch.randint(0, 255, (5 * STAGE_BYTES + 12345,), dtype=torch.uint8)
    target = torch.empty_like(source, device="cuda")
    with resident._bar(source.nbytes, "copy", progress=False) as bar:
        copy_staged([(source, target)], bar)
    assert torch.equal(target.cpu(), source)
