"""Runs the PTX of one program with several warps on the CPU: shared memory, barriers, mbarriers, ``wgmma``.

On top of :mod:`.ptx_warp`. Warps take turns at random wherever one may wait. ``wgmma`` (A in registers, B in shared
memory in the 128-byte swizzle) reads and writes as late as it may: when its group is waited for. So a barrier that is
missing shows as a wrong result, one that nobody completes as an error.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tests.ops import ptx_warp
from tests.ops.ptx_warp import Memory, Value

_LANES = np.arange(32)
_U = np.uint64
_M32 = _U(0xFFFFFFFF)
_SHARED = 1024  # where dynamic shared memory starts
_POISON = np.full(32, 0x7F812345, _U)


@dataclass(frozen=True)
class Instruction:
    predicate: str
    op: str
    args: list[str]
    parts: list[list[str]]  # of operands in braces
    text: str


def parse(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of the one entry function and where labels are; a label of inline PTX belongs to its block."""
    text = re.sub(r"//.*", "", ptx)
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    block = 0
    for line in text[text.index("{", text.index(".entry")) :].splitlines():
        line = re.sub(r"^\s*([\w$]+):", r"\1:;", line).strip()
        if line.startswith((".loc", ".section", ".b8", ".file", ".b32", ".b64", ".b16")):
            continue
        for statement in line.split(";"):
            statement = statement.strip()
            while statement[:1] in ("{", "}"):
                block += statement[0] == "{"
                statement = statement[1:].strip()
            if not statement or statement.startswith("."):
                continue
            if statement.endswith(":"):
                labels[_label(statement[:-1], block)] = len(code)
                continue
            predicate = ""
            if statement.startswith("@"):
                predicate, statement = statement[1:].split(None, 1)
            op, *rest = statement.split(None, 1)
            args = ptx_warp.Kernel._operands(rest[0]) if rest else []
            if op.startswith("bra"):
                args = [_label(args[0], block)]
            parts = [[part.strip() for part in arg.strip("{} ").split(",")] for arg in args]
            code.append(Instruction(predicate, op, args, parts, line))
    return code, labels


def _label(name: str, block: int) -> str:
    return name if name.startswith("$") else f"{name} {block}"


@dataclass
class Barrier:
    """Of an mbarrier or a named one: arrivals of a phase, those still missing, phases completed, bytes expected."""

    count: int
    missing: int
    phase: int = 0
    expected: int = 0

    def has_passed(self, parity: int) -> bool:
        """Whether the phase of that parity is complete, as far as the last two go."""
        return (self.phase ^ parity) & 1 == 1

    def arrive(self, expected: int = 0) -> None:
        self.missing -= 1
        self.expected += expected
        assert self.missing >= 0, "more arrivals than a phase has"
        self.complete(0)

    def complete(self, arrived: int) -> None:
        """Bytes of a bulk copy."""
        self.expected -= arrived
        if self.missing == 0 and self.expected == 0:
            self.missing, self.phase = self.count, self.phase + 1


@dataclass
class TensorMap:
    """What TMA copies from, a parameter of a launch: rows [n, bytes] uint8; a box is 128 bytes of ``box`` rows."""

    rows: np.ndarray
    box: int


class Program:
    """One program of a launch: ``params`` in the order of the PTX, addresses in ``memory``."""

    def __init__(
        self, ptx: str, memory: Memory, params: Sequence[int | float | TensorMap], program: tuple[int, int], warps: int,
        shared: int, seed: int = 0,
    ) -> None:  # fmt: skip
        self.code, self.labels = parse(ptx)
        self.memory, self.params, self.program, self.warps = memory, params, program, warps
        self.shared = np.full(shared, 0xA5, np.uint8)
        self.mbarriers: dict[int, Barrier] = {}
        self.barriers: dict[int, Barrier] = {}
        self.random = random.Random(seed)

    def run(self) -> None:
        """To the end of every warp. Raises RuntimeError where all of them wait."""
        for _ in self.turns():
            pass

    def turns(self) -> Iterator[None]:
        """``run``, a turn of one warp at a time: for programs that run at once."""
        running = {warp: self._warp(warp) for warp in range(self.warps)}
        waiting: dict[int, Callable[[], bool]] = {}
        while running:
            ready = [warp for warp in running if warp not in waiting or waiting[warp]()]
            if not ready:
                raise RuntimeError(f"expected a warp that can go on, found {self.mbarriers} and {self.barriers}")
            warp = self.random.choice(ready)
            waiting.pop(warp, None)
            try:
                waiting[warp] = next(running[warp])
            except StopIteration:
                del running[warp]
            yield

    def _at(self, space: str, address: int, size: int) -> np.ndarray:
        if space == "global":
            return self.memory.at(address, size)
        if address % size or not _SHARED <= address <= _SHARED + len(self.shared) - size:
            raise ValueError(f"access of {size} bytes at {address:#x} of shared memory")
        return self.shared[address - _SHARED : address - _SHARED + size]

    def _warp(self, warp: int) -> Iterator[Callable[[], bool]]:
        """Yields what to wait for."""
        regs: dict[str, Value] = {}
        predicates: dict[str, np.ndarray] = {}
        group: list[Callable[[], None]] = []
        groups: list[list[Callable[[], None]]] = []
        special = {
            "global_smem": _SHARED, "%ctaid.x": self.program[0], "%nctaid.x": self.program[1]
        }  # fmt: skip

        def read(name: str) -> Value:
            if name in regs:
                return regs[name]
            if name == "%tid.x":
                return (_LANES + 32 * warp).astype(_U)
            if "_param_" in name:  # the address of a parameter stands for its number
                return np.full(32, int(name.rsplit("_", 1)[1]), _U)
            if name.startswith("0f"):
                return np.full(32, int(name[2:], 16), _U)
            return np.full(32, special[name] if name in special else int(name, 0) & (2**64 - 1), _U)

        def write(name: str, value: Value, live: np.ndarray | None, width: int = 64) -> None:
            value = value & _U((1 << width) - 1)
            if live is not None and not live.all():
                value = np.where(live, value, regs.get(name, np.zeros(32, _U)))
            regs[name] = value

        def address(text: str) -> Value:
            base, _, offset = text.strip("[] ").partition("+")
            return read(base.strip()) + _U(int(offset.strip() or "0"))

        at = 0
        while at < len(self.code):
            i = self.code[at]
            at += 1
            args, parts, kind = i.args, i.parts, i.op.split(".")
            live = None
            if i.predicate:
                live = ~predicates[i.predicate[1:]] if i.predicate[0] == "!" else predicates[i.predicate]
            width = int(kind[-1][1:]) if kind[-1][1:] in ("16", "64") else 32
            if kind[0] == "bra":
                assert live is None or live.all() or not live.any(), f"branch that divides the warp: {i.text}"
                if live is None or live.all():
                    at = self.labels[args[0]]
            elif kind[0] == "ret":
                return
            elif kind[0] in ("bar", "barrier"):
                count = int(args[1]) // 32 if len(args) > 1 else self.warps
                barrier = self.barriers.setdefault(int(args[0]), Barrier(count, count))
                phase = barrier.phase
                barrier.arrive()
                yield partial(barrier.has_passed, phase)
            elif kind[0] == "mbarrier":
                if kind[1] == "try_wait":
                    mbarrier, parity = self.mbarriers[int(address(args[1])[0])], int(read(args[2])[0]) & 1
                    yield partial(mbarrier.has_passed, parity)
                    predicates[args[0]] = np.ones(32, bool)
                elif live is None or live.any():
                    if kind[1] == "init":
                        count = int(args[1])
                        self.mbarriers[int(address(args[0])[0])] = Barrier(count, count)
                    else:
                        assert kind[1] == "arrive"
                        assert live is not None
                        assert live.sum() == 1
                        self.mbarriers[int(address(args[1])[0])].arrive(int(args[2]) if kind[2] == "expect_tx" else 0)
            elif kind[0] in ("setmaxnreg", "fence") or i.op.startswith("wgmma.fence"):
                continue
            elif i.op.startswith("wgmma.commit"):
                groups.append(group)
                group = []
            elif i.op.startswith("wgmma.wait"):
                while len(groups) > int(args[0]):
                    for multiply in groups.pop(0):
                        multiply()
            elif kind[0] == "wgmma":
                assert i.op.startswith("wgmma.mma_async.sync.aligned.m64n")
                assert i.op.endswith("k16.f32.f16.f16")
                assert args[4:] == ["1", "1", "0"]
                add = bool(predicates[args[3]][0]) if args[3] in predicates else args[3] != "0"
                a = [read(name).copy() for name in parts[1]]
                group.append(self._multiply(regs, parts[0], a, int(read(args[2])[0]), add))
                if not add:
                    regs.update(dict.fromkeys(parts[0], _POISON))
                yield lambda: True
            elif i.op.startswith("cp.async.bulk.tensor.2d"):
                if live is None or live.any():
                    assert live is None or live.sum() == 1
                    names = re.findall(r"%\w+", i.text[i.text.index("[") :])
                    self._copy_box(*(int(read(name)[int(np.argmax(live))]) for name in names))
            elif kind[0] == "prefetch":
                for x in address(args[0]):
                    self.memory.at(int(x), 1)
            elif kind[:2] == ["ld", "param"]:
                given = self.params[int(args[1].strip("[]").rsplit("_", 1)[1])]
                assert not isinstance(given, TensorMap)
                bits = struct.unpack("<I", struct.pack("<f", given))[0] if isinstance(given, float) else given
                write(args[0], np.full(32, bits & (2**64 - 1), _U), None)
            elif kind[0] in ("ld", "st"):
                names, where = (parts[0], address(args[1])) if kind[0] == "ld" else (parts[1], address(args[0]))
                size = int(kind[-1][1:]) // 8
                values = [regs.get(name, np.zeros(32, _U)).copy() if kind[0] == "ld" else read(name) for name in names]
                for lane in _LANES if live is None else _LANES[live]:
                    data = self._at(kind[1], int(where[lane]), size * len(names)).view(f"<u{size}")
                    for k, value in enumerate(values):
                        if kind[0] == "ld":
                            value[lane] = data[k]
                        else:
                            data[k] = int(value[lane]) & ((1 << 8 * size) - 1)
                if kind[0] == "ld":
                    regs.update(zip(names, values, strict=True))
            elif kind[0] in ("atom", "red"):
                assert "add" in kind
                dtype = np.float32 if kind[-1] == "f32" else np.uint32
                where, added, old = address(args[-2]), read(args[-1]).astype(np.uint32).view(dtype), np.zeros(32, _U)
                for lane in _LANES if live is None else _LANES[live]:
                    data = self._at("global" if "global" in kind else "shared", int(where[lane]), 4)
                    old[lane] = data.view(np.uint32)[0]
                    data.view(dtype)[:] += added[lane : lane + 1]
                if kind[0] == "atom":
                    write(args[0], old, live)
            elif kind[0] == "ldmatrix":
                assert i.op == "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
                rows = np.stack([self._at("shared", int(x), 16) for x in address(args[1])]).view("<u4")
                for k, name in enumerate(parts[0]):
                    regs[name] = rows[8 * k + _LANES // 4, _LANES % 4].astype(_U)
            elif kind[0] == "elect":
                predicates[args[0].split("|")[1]] = _LANES == 0
            elif kind[0] == "vote":
                (bits,) = np.packbits(predicates[args[1]], bitorder="little").view("<u4")
                write(args[0], np.full(32, bits, _U), None)
            elif kind[0] == "redux":
                x = ptx_warp._signed(read(args[1]))
                if kind[2] in ("max", "min"):
                    assert kind[3] == "s32"
                    reduced = x.max() if kind[2] == "max" else x.min()
                else:
                    reduced = np.bitwise_or.reduce(x) if kind[2] == "or" else x.sum()
                write(args[0], ptx_warp._unsigned(np.full(32, reduced)), None)
            elif kind[0] == "setp":
                x, y = read(args[1]), read(args[2])
                if kind[2][0] == "f":
                    x, y = ptx_warp._f32(x), ptx_warp._f32(y)
                elif kind[2][0] == "s":
                    x, y = ptx_warp._signed(x, width), ptx_warp._signed(y, width)
                else:
                    x, y = x & _U((1 << width) - 1), y & _U((1 << width) - 1)
                predicates[args[0]] = ptx_warp._COMPARE[kind[1]](x, y)
            elif kind[-1] == "pred":
                p = [predicates[name] if name in predicates else np.full(32, name != "0") for name in args[1:]]
                predicates[args[0]] = {
                    "mov": lambda p=p: p[0], "not": lambda p=p: ~p[0], "and": lambda p=p: p[0] & p[1],
                    "or": lambda p=p: p[0] | p[1], "xor": lambda p=p: p[0] ^ p[1],
                }[kind[0]]()  # fmt: skip
            elif kind[0] == "mov" and args[0].startswith("{"):
                write(parts[0][0], read(args[1]) & _U(0xFFFF), live)
                write(parts[0][1], read(args[1]) >> _U(16) & _U(0xFFFF), live)
            elif kind[0] == "mov" and args[1].startswith("{"):
                low, high = (read(name) & _U(0xFFFF) for name in parts[1])
                write(args[0], low | high << _U(16), live)
            elif kind[0] == "selp":
                write(args[0], np.where(predicates[args[3]], read(args[1]), read(args[2])), live, width)
            else:
                with np.errstate(all="ignore"):
                    value = _value(kind, [read(name) for name in args[1:]], width)
                if kind[1:2] == ["wide"]:
                    width *= 2
                elif i.op == "cvt.s32.s16":
                    width = 32
                elif len(kind) > 2 and kind[-2].endswith("64"):
                    width = 64
                write(args[0], value, live, width)

    def _copy_box(self, to: int, tensor: int, x: int, y: int, barrier: int) -> None:
        """At once, which is the earliest that it may happen; rows past the end are zero. A swizzle of 128 bytes."""
        source = self.params[tensor]
        assert isinstance(source, TensorMap)
        box = np.zeros((source.box, 128), np.uint8)
        there = source.rows[y : y + source.box, 2 * x : 2 * x + 128]
        box[: len(there)] = there
        at = to + np.arange(box.size).reshape(box.shape)
        at ^= (at >> 7 & 7) << 4
        assert to % 1024 == 0
        self.shared[at - _SHARED] = box
        self.mbarriers[barrier].complete(box.size)

    def _multiply(
        self, regs: dict[str, Value], out: list[str], a: list[Value], descriptor: int, add: bool
    ) -> Callable[[], None]:
        """m64nNk16, the 16 rows of a warp: ``out`` (+)= A B."""
        assert descriptor >> 62 == 1, "expected a swizzle of 128 bytes"
        start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        g, t = _LANES // 4, _LANES % 4

        def multiply() -> None:
            row, byte = np.arange(2 * len(out))[:, None], np.arange(32)
            at = start + row // 8 * stride + row % 8 * 128 + byte
            at ^= (at >> 7 & 7) << 4
            B = self.shared[at - _SHARED].view(np.float16).astype(np.float64)
            A = np.zeros((16, 16))
            for r, value in enumerate(a):
                A[g[:, None] + 8 * (r % 2), 2 * t[:, None] + 8 * (r // 2) + np.arange(2)] = (
                    value.astype(np.uint32).view(np.float16).reshape(32, 2)
                )
            with np.errstate(all="ignore"):
                D = A @ B.T
            for j, name in enumerate(out):
                d = D[g + 8 * (j // 2 % 2), 8 * (j // 4) + 2 * t + j % 2]
                regs[name] = ptx_warp._bits(d + ptx_warp._f32(regs[name]) if add else d)

        return multiply


def _value(kind: list[str], x: list[Value], width: int) -> Value:
    """What :class:`.ptx_warp.Kernel` does not know or what differs in more than one warp; else its."""
    name, last = kind[0], kind[-1]
    mask = _U((1 << width) - 1)
    if name == "shfl" and kind[2] == "idx":
        return x[0][(x[1] & _U(31)).astype(int)]
    if name == "shfl" and kind[2] == "up":
        assert not x[2].any()
        source = _LANES - x[1].astype(int)
        return x[0][np.where(source < 0, _LANES, source)]
    if name == "popc":
        return np.array([int(v & _M32).bit_count() for v in x[0]], _U)
    if name == "not":
        return ~x[0]
    if name == "cvta":
        return x[0]
    if name == "neg":
        return (
            -x[0].view(np.int64).astype(_U)
            if width == 64
            else ptx_warp._unsigned(-ptx_warp._signed(x[0], width), width)
        )
    if name == "shl":
        return np.where((x[1] & _M32) < _U(width), (x[0] & mask) << np.minimum(x[1] & _M32, _U(63)), _U(0))
    if name == "div":
        a, b = ptx_warp._signed(x[0], width), ptx_warp._signed(x[1], width)
        return ptx_warp._unsigned(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)), width)
    if name == "fma" and last == "f16x2":
        a, b, c = (ptx_warp._unpacked([y], "f16") for y in x)
        return np.ascontiguousarray((a * b + c).astype(np.float16)).view(np.uint32).reshape(32).astype(_U)
    if name == "dp2a":
        assert kind[1] == "lo"
        halves = x[0].astype(np.uint32).view(np.int16).reshape(32, 2).astype(np.int64)
        factors = x[1].astype(np.uint32).view(np.int8).reshape(32, 4)[:, :2].astype(np.int64)
        return ptx_warp._unsigned((halves * factors).sum(1) + ptx_warp._signed(x[2]))
    if name == "max" and last == "s16x2":
        a, b = (y.astype(np.uint32).view(np.int16) for y in x)
        return np.maximum(a, b).view(np.uint32).astype(_U)
    if name in ("min", "max") and last == "f32":  # a number wins against what is none
        return ptx_warp._bits({"min": np.fmin, "max": np.fmax}[name](*map(ptx_warp._f32, x)))
    return ptx_warp.Kernel._value(kind, x, width)
