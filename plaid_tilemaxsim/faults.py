"""What goes wrong at run time beyond wrong arguments, told apart and said so that one can act on it."""

from __future__ import annotations

import os

import torch

_SHORTAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

_cuda_before_fork = False
_forked = False


def _before_fork() -> None:
    global _cuda_before_fork
    _cuda_before_fork = torch.cuda.is_initialized()


def _after_fork_in_child() -> None:
    global _forked
    _forked = _forked or _cuda_before_fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def check_fork() -> None:
    """RuntimeError in a process forked from one that had used CUDA: there CUDA fails, or looks as if it were absent."""
    if _forked:
        raise RuntimeError(
            "CUDA: expected a process of its own, got one forked from a process that had used CUDA; start workers "
            'with multiprocessing.get_context("spawn") (or set_start_method("spawn")), or fork before the first search'
        )


def is_kernel_failure(error: BaseException) -> bool:
    """Whether compiling or launching a kernel failed, or the device while it ran one."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, RuntimeError) or type(error).__module__.partition(".")[0] == "triton"


def kernel_failure(error: BaseException, device: torch.device) -> RuntimeError:
    """What to raise from it where the device still works."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return RuntimeError(
        f"kernel on {name}: expected it to run, got {first_line(error)}; other searches can go on. "
        "`plaid-tilemaxsim env` prints what a bug report needs"
    )


def device_lost(error: BaseException, device: torch.device) -> RuntimeError:
    """What to raise from it where the device no longer answers, as after an access outside its memory."""
    return RuntimeError(
        f"{device}: expected it to answer, got {first_line(error)}; CUDA cannot be used any more in this "
        "process: start a new one. `plaid-tilemaxsim env` prints what a bug report needs"
    )


def memory_shortage(error: BaseException) -> str | None:
    """What an error says that means too little memory on the device, or on the host for what is pinned.

    Not only torch's allocator finds that: the driver does when it loads a kernel or a graph, cuBLAS for its workspace.
    A recording that ends without one then may fail with another error, which has this one as its context.
    """
    for one in (error, error.__context__):
        if isinstance(one, torch.OutOfMemoryError):
            return first_line(one)
        if isinstance(one, RuntimeError) and any(words in str(one) for words in _SHORTAGES):
            return first_line(one)
    return None


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"[:300]
