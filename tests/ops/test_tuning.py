"""Block choices: within every chip's limits for every shape that the API admits."""

import pytest
import torch

from plaid_tilemaxsim.ops import tuning

ARCHS = [80, 86, 89, 90, 100]
DIMS = [32, 40, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


def is_power_of_two(x):
    return x & (x - 1) == 0 < x


@pytest.mark.parametrize(("DIM", "largest", "want"), [(128, 128, 128), (96, 128, 32), (384, 128, 128), (40, 128, 32)])
def test_dim_block(DIM, largest, want):
    assert tuning.dim_block(DIM, largest) == want


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("DIM", DIMS)
def test_blocks_fit(arch, DIM):
    for LQP in (16, 32, 64, 128, 1024):
        scores = tuning.centroid_scores_blocks(arch, LQP, DIM)
        assert scores.BLOCK_C % 32 == 0  # whole words of keep_bits
        assert LQP % scores.BLOCK_Q == 0
        assert scores.num_stages * scores.BLOCK_C * scores.BLOCK_D * 2 <= SHARED[arch]
        centroid = tuning.centroid_blocks(arch, LQP)
        assert LQP % centroid.BLOCK_Q == 0
        assert centroid.BLOCK_N * centroid.BLOCK_Q * 2 // 32 <= 256  # bytes of a tile in one thread's registers
        assert not (centroid.PACKED and tuning.interpreted())
        kept = tuning.centroid_kept_blocks(arch, LQP)
        assert LQP % kept.BLOCK_Q == 0
        assert 32 % (kept.BLOCK_Q // 8) == 0  # lanes of a group
        for nbits in (1, 2, 4, 8):
            residual = tuning.residual_blocks(arch, nbits, DIM, LQP)
            assert LQP % residual.BLOCK_Q == 0
            assert is_power_of_two(residual.BLOCK_P)
            assert residual.BLOCK_P >= 16
            assert not residual.KEEP_Q or DIM * nbits // 8 <= residual.BLOCK_P
            batch = tuning.residual_batch_blocks(arch, nbits, DIM)
            registers = -(-(batch.maxnreg or 255) // 8) * 8  # as they are handed out
            assert batch.programs_per_sm * 32 * registers <= 65536


def test_fewer_blocks_or_all_registers_where_rows_of_several_queries_spill():
    def choice(*shape):
        blocks = tuning.residual_batch_blocks(*shape)
        return blocks.BLOCKS, blocks.maxnreg

    assert {choice(90, nbits, DIM) for nbits in (1, 2, 4) for DIM in (32, 64, 96, 128)} == {(4, None)}
    for arch in (80, 86, 89, 100):
        assert [choice(arch, nbits, 64) for nbits in (1, 2, 4)] == [(4, None), (3, None), (3, None)]
        assert choice(arch, 2, 96) == (4, 255 if arch == 80 else None)
        assert choice(arch, 2, 128) == (4, None)


def test_tf32x3_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="precision: expected ieee or tf32 for fp32 with DIM 1024 on sm_89"):
        tuning.dense_blocks(89, 4, 1024, 32, 1, None, "tf32x3")
    assert tuning.dense_blocks(90, 4, 1024, 32, 1, None, "tf32x3").num_stages == 1


def test_the_portable_residual_kernel_runs_where_ptx_cannot(monkeypatch):
    monkeypatch.setattr(tuning, "interpreted", lambda: False)
    assert [tuning.residual_is_fast(90, nbits, 128) for nbits in (1, 2, 4, 8)] == [True, True, True, False]
    assert not tuning.residual_is_fast(75, 2, 128)
    monkeypatch.setattr(tuning, "interpreted", lambda: True)
    assert not tuning.residual_is_fast(90, 2, 128)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("DIM", DIMS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("fixed_length", [None, 1, 128, 300])
def test_dense_blocks_fit(arch, DIM, itemsize, fixed_length):
    for LQ in (1, 16, 17, 32, 128, 1024):
        for NQ in (1, 3, 100):
            b = tuning.dense_blocks(arch, itemsize, DIM, LQ, NQ, fixed_length)
            assert all(is_power_of_two(x) for x in (b.LQP, b.BLOCK_N, b.BLOCK_Q, b.BLOCK_D))
            assert b.BLOCK_Q % b.LQP == 0
            assert b.BLOCK_Q <= 128
            assert b.LQP == b.BLOCK_Q or b.LQP >= LQ  # several queries share a block only when each fits
            row = -(-DIM // b.BLOCK_D) * b.BLOCK_D * itemsize
            assert b.BLOCK_N >= 16
            used = b.num_stages * b.BLOCK_N * row + (
                b.BLOCK_Q * row if arch >= 90 and b.num_warps > 1 and b.BLOCK_N >= 64 else 0
            )
            assert used <= SHARED[arch]


def test_the_interpreter_takes_the_choices_of_sm_90():
    assert tuning.arch(torch.device("cpu")) == 90
    assert 1 < tuning.num_sms(torch.device("cpu")) < 16


@pytest.mark.parametrize("fixed", [True, False])
def test_late_programs_start_for_long_lists_alone(fixed):
    for programs in (1, 132, 1056):
        assert tuning.late_share((128 if fixed else 32) * programs - 1, programs, fixed) == (0, 0)
        for n in (128 * programs, 1000 * programs + 7, 2**31 - 1):
            late, part = tuning.late_share(n, programs, fixed)
            assert 0 < late <= 8 * programs
            assert n // (part * late) >= 4  # passages of one of them
