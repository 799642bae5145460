"""Controls of sanitize.py for kernels that part a program's warps (sm_90). Not of the package.

Triton hands partitions over to their warps through shared memory of its own. The source of ``_dispatch_kernel`` uses
none, so that whatever racecheck reports of it is of that; ``_racing_kernel`` has a race that racecheck must find.
"""

# mypy: disable-error-code="misc,no-untyped-def"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

THREADS = gl.constexpr(128)  # of each of three partitions
REGISTERS = gl.constexpr(168)  # of every thread

# renamed after triton 3.6
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _partition(out_ptr, first, last, BARRIERS: gl.constexpr, PLACE: gl.constexpr):
    thread = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for i in range(first, last):
        if BARRIERS:
            _barrier()
        gl.store(out_ptr + (gl.program_id(0) * 3 + PLACE) * THREADS + thread, i * 3 + PLACE + thread)


@gluon.jit
def _dispatch_kernel(shares_ptr, out_ptr, BARRIERS: gl.constexpr):
    first = gl.load(shares_ptr + gl.program_id(0) * 2)
    last = gl.load(shares_ptr + gl.program_id(0) * 2 + 1)
    if first < last:
        if BARRIERS:
            _barrier()
        gl.warp_specialize(
            [
                (_partition, (out_ptr, first, last, BARRIERS, 0)),
                (_partition, (out_ptr, first, last, BARRIERS, 1)),
                (_partition, (out_ptr, first, last, BARRIERS, 2)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )


@gluon.jit
def _write(tile, value):
    tile.store(value + gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def _read(tile, out_ptr):
    thread = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out_ptr + gl.program_id(0) * THREADS + thread, tile.load(thread.type.layout))


@gluon.jit
def _racing_kernel(shares_ptr, out_ptr):
    first = gl.load(shares_ptr + gl.program_id(0) * 2)
    last = gl.load(shares_ptr + gl.program_id(0) * 2 + 1)
    if first < last:
        # int64: matrix instructions are for narrower ones
        tile = gl.allocate_shared_memory(gl.int64, [THREADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        gl.warp_specialize([(_write, (tile, first.to(gl.int64))), (_read, (tile, out_ptr))], [4], [REGISTERS])


def dispatch(shares: Tensor, out: Tensor, barriers: bool) -> None:
    """``out[program, partition, thread] = 3 (last - 1) + partition + thread`` where ``first < last``, else as it was.

    ``shares`` int32 [programs, 2] has first and last of each program, ``out`` is int32 [programs, 3, 128]. With
    ``barriers`` the warps of a partition also meet among themselves.
    """
    _dispatch_kernel[(len(shares),)](shares, out, BARRIERS=barriers, num_warps=4, maxnreg=REGISTERS.value)


def race(shares: Tensor, out: Tensor) -> None:
    """Writes to ``out`` int64 [programs, 128] what one partition reads of shared memory while another writes it."""
    _racing_kernel[(len(shares),)](shares, out, num_warps=4, maxnreg=REGISTERS.value)
