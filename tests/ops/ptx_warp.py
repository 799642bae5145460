"""Runs the PTX of a kernel with one warp per program on the CPU, lane by lane in numpy.

Enough of PTX for kernels written around ``mma.sync``: it checks address arithmetic (loads outside the given buffers
raise), register fragments, shuffles and control flow, which must be uniform in a warp. Not speed, not races.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_LANES = np.arange(32)
_M32 = np.uint64(0xFFFFFFFF)
Value = np.ndarray  # uint64 [32], the bits of a register in every lane


class Memory:
    """Global memory: buffers at addresses of our choice, with unreadable space between them."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, np.ndarray]] = []
        self.end = 1 << 40

    def add(self, array: np.ndarray) -> int:
        """Address of a contiguous array, which stores then change in place."""
        address = self.end
        self.buffers.append((address, array.reshape(-1).view(np.uint8)))
        self.end += (array.nbytes + (1 << 20)) & -4096
        return address

    def at(self, address: int, size: int) -> np.ndarray:
        """The ``size`` bytes there, as a view."""
        if address % size:
            raise ValueError(f"address {address:#x} is not a multiple of {size}")
        for base, data in self.buffers:
            if base <= address and address + size <= base + len(data):
                return data[address - base : address - base + size]
        raise ValueError(f"access of {size} bytes at {address:#x}, outside every buffer")


def _f32(bits: Value) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def _bits(values: np.ndarray) -> Value:
    return values.astype(np.float32).view(np.uint32).astype(np.uint64)


def _signed(bits: Value, width: int = 32) -> np.ndarray:
    if width == 64:
        return bits.view(np.int64)
    return bits.astype({32: np.uint32, 16: np.uint16}[width]).view({32: np.int32, 16: np.int16}[width]).astype(np.int64)


def _unsigned(values: np.ndarray, width: int = 32) -> Value:
    return values.astype(np.int64).view(np.uint64) & np.uint64((1 << width) - 1)


def prmt(a: Value, b: Value, selector: Value) -> Value:
    """Byte permute in its default mode: a nibble's low 3 bits pick one of 8 bytes, bit 3 repeats that byte's sign."""
    both = a | (b << np.uint64(32))
    result = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return result


def lop3(a: Value, b: Value, c: Value, lut: int) -> Value:
    result = np.zeros_like(a)
    for i in range(8):
        if lut >> i & 1:
            parts = [x if i >> k & 1 else ~x for x, k in ((a, 2), (b, 1), (c, 0))]
            result |= parts[0] & parts[1] & parts[2]
    return result & _M32


def _unpacked(regs: list[Value], dtype: str) -> np.ndarray:
    """[32, n, values in a register] numbers of registers, as fp64; TF32 ignores the low 13 bits."""
    words = np.stack(regs, 1).astype(np.uint32)
    if dtype == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32)[:, :, None].astype(np.float64)
    if dtype == "bf16":
        return np.stack([words << np.uint32(16), words & np.uint32(0xFFFF0000)], 2).view(np.float32).astype(np.float64)
    return words.view(np.float16).reshape(32, len(regs), 2).astype(np.float64)


def mma(a: list[Value], b: list[Value], c: list[Value], dtype: str = "f16") -> list[Value]:
    """m16n8k16 of fp16 or bf16, m16n8k8 of TF32; the sum is exact, then rounded once."""
    av, bv = _unpacked(a, dtype), _unpacked(b, dtype)
    g, t = _LANES // 4, _LANES % 4
    values = av.shape[2]
    A, B, C = np.zeros((16, 8 * values)), np.zeros((8 * values, 8)), np.zeros((16, 8))
    for i in range(values):
        for r in range(4):
            A[g + 8 * (r % 2), values * (t + 4 * (r // 2)) + i] = av[:, r, i]
        for r in range(2):
            B[values * (t + 4 * r) + i, g] = bv[:, r, i]
    for r in range(4):
        C[g + 8 * (r // 2), 2 * t + r % 2] = _f32(c[r])
    D = A @ B + C
    return [_bits(D[g + 8 * (r // 2), 2 * t + r % 2]) for r in range(4)]


_PREDICATES: dict[str, Callable[..., np.ndarray]] = {
    "mov": np.copy, "not": np.logical_not, "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
}  # fmt: skip
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "num": lambda x, y: (x == x) & (y == y),
    "nan": lambda x, y: (x != x) | (y != y),
}  # fmt: skip


class Kernel:
    """One entry function of PTX text; ``run`` executes one program."""

    def __init__(self, ptx: str) -> None:
        text = re.sub(r"//.*", "", ptx)
        body = text[text.index("{", text.index(".entry")) :]
        self.code: list[tuple[str, str, list[str]]] = []  # predicate, operation, operands
        self.labels: dict[str, int] = {}
        for line in body.splitlines():
            line = line.strip()
            if line.startswith("$") and line.endswith(":"):
                self.labels[line[:-1]] = len(self.code)
                continue
            if line.startswith((".loc", ".section", ".b8", ".file")):
                continue
            for statement in line.split(";"):
                statement = statement.strip()
                if statement.startswith(("{.reg", "{ .reg")):
                    statement = statement[1:].strip()
                if statement in ("", "{", "}") or statement.startswith("."):
                    continue
                predicate = ""
                if statement.startswith("@"):
                    predicate, statement = statement[1:].split(None, 1)
                op, *rest = statement.split(None, 1)
                self.code.append((predicate, op, self._operands(rest[0]) if rest else []))

    @staticmethod
    def _operands(text: str) -> list[str]:
        """Split at commas outside braces and brackets."""
        parts, depth, current = [], 0, ""
        for character in text:
            depth += character in "{[("
            depth -= character in ")]}"
            if character == "," and not depth:
                parts.append(current.strip())
                current = ""
            else:
                current += character
        return [*parts, current.strip()]

    def run(
        self,
        memory: Memory,
        params: Sequence[int | float],
        program: tuple[int, int] = (0, 1),
        registers: dict[str, Value] | None = None,
        limit: int = 10**7,
    ) -> int:
        """Execute program ``program[0]`` of ``program[1]``, from and into ``registers``; the number of instructions."""
        regs: dict[str, Value] = {} if registers is None else registers
        predicates: dict[str, np.ndarray] = {}

        def read(name: str) -> Value:
            if name in regs:
                return regs[name]
            if name.startswith("0f"):
                return np.full(32, int(name[2:], 16), np.uint64)
            special = {"%ctaid.x": program[0], "%nctaid.x": program[1]}
            if name in special:
                return np.full(32, special[name], np.uint64)
            if name in ("%tid.x", "%laneid"):
                return _LANES.astype(np.uint64)
            if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", name):
                return np.full(32, int(name, 0) & (2**64 - 1), np.uint64)
            raise KeyError(name)

        def many(text: str) -> list[str]:
            return [part.strip() for part in text.strip("{} ").split(",")]

        def write(name: str, value: Value, live: np.ndarray | None, width: int = 64) -> None:
            value = value & np.uint64((1 << width) - 1)
            if live is not None and not live.all():
                value = np.where(live, value, regs.get(name, np.zeros(32, np.uint64)))
            regs[name] = value

        at = executed = 0
        while at < len(self.code):
            predicate, op, args = self.code[at]
            at += 1
            executed += 1
            if executed > limit:
                raise RuntimeError(f"more than {limit} instructions")
            live = None
            if predicate:
                live = ~predicates[predicate[1:]] if predicate[0] == "!" else predicates[predicate]
            kind = op.split(".")
            width = 64 if kind[-1][1:] == "64" else 32
            if kind[0] == "bra":
                assert live is None or live.all() or not live.any(), "branch that divides the warp"
                if live is None or live.all():
                    at = self.labels[args[0]]
                continue
            if kind[0] == "ret":
                break
            if kind[0] in ("ld", "st"):
                pointer = args[1] if kind[0] == "ld" else args[0]
                if kind[1] == "param":
                    given = params[int(pointer.strip("[]").rsplit("_", 1)[1])]
                    bits = struct.unpack("<I", struct.pack("<f", given))[0] if isinstance(given, float) else given
                    write(args[0], np.full(32, bits & (2**64 - 1), np.uint64), None)
                    continue
                base, _, offset = pointer.strip("[] ").partition("+")
                address = read(base.strip()) + np.uint64(int(offset.strip() or "0", 0))
                names = many(args[0] if kind[0] == "ld" else args[1])
                size = int(kind[-1][1:]) // 8
                for lane in range(32):
                    if live is None or live[lane]:
                        data = memory.at(int(address[lane]), size * len(names)).reshape(len(names), size)
                        for name, piece in zip(names, data, strict=True):
                            if kind[0] == "ld":
                                old = regs.get(name, np.zeros(32, np.uint64)).copy()
                                old[lane] = int.from_bytes(piece.tobytes(), "little")
                                regs[name] = old
                            else:
                                piece[:] = np.frombuffer(int(read(name)[lane]).to_bytes(8, "little")[:size], np.uint8)
                continue
            if kind[0] == "mma":
                dtype = kind[7]
                shape = "m16n8k8" if dtype == "tf32" else "m16n8k16"
                assert op == f"mma.sync.aligned.{shape}.row.col.f32.{dtype}.{dtype}.f32"
                a, b, c = ([read(n) for n in many(x)] for x in args[1:])
                results = mma(a, b, c, dtype)
                for name, value in zip(many(args[0]), results, strict=True):
                    write(name, value, live)
                continue
            if kind[0] == "setp":
                x, y = read(args[1]), read(args[2])
                if kind[2][0] == "f":
                    x, y = _f32(x), _f32(y)
                elif kind[2][0] == "s":
                    x, y = _signed(x, width), _signed(y, width)
                elif width == 32:
                    x, y = x & _M32, y & _M32
                predicates[args[0]] = _COMPARE[kind[1]](x, y)
                continue
            if kind[-1] == "pred":
                flags = [predicates[name] if name in predicates else np.full(32, name != "0") for name in args[1:]]
                predicates[args[0]] = _PREDICATES[kind[0]](*flags)
                continue
            if kind[0] == "mov" and args[0].startswith("{"):
                low, high = many(args[0])
                write(low, read(args[1]) & np.uint64(0xFFFF), live)
                write(high, read(args[1]) >> np.uint64(16), live)
                continue
            if kind[0] == "selp":
                write(args[0], np.where(predicates[args[3]], read(args[1]), read(args[2])), live, width)
                continue
            value = self._value(kind, [read(a) for a in args[1:]], width)
            write(args[0], value, live, 64 if "wide" in kind or kind[-2].endswith("64") else width)
        return executed

    @staticmethod
    def _value(kind: list[str], x: list[Value], width: int) -> Value:
        name, last = kind[0], kind[-1]
        if name == "mov":
            return x[0]
        if name == "prmt":
            return prmt(x[0] & _M32, x[1] & _M32, x[2])
        if name == "lop3":
            return lop3(x[0], x[1], x[2], int(x[3][0]))
        if name == "shfl":
            assert kind[2] == "bfly"
            return x[0][_LANES ^ int(x[1][0])]
        if name == "cvt":
            if kind[1:3] == ["rna", "tf32"]:
                return (x[0] + np.uint64(0x1000)) & np.uint64(0xFFFFE000)
            if kind[1:] == ["rn", "f16x2", "f32"]:  # the first operand goes to the upper half
                high, low = (_f32(y).astype(np.float16).view(np.uint16).astype(np.uint64) for y in x)
                return high << np.uint64(16) | low
            if kind[1:] == ["f32", "f16"]:
                return _bits(x[0].astype(np.uint16).view(np.float16))
            to, source = kind[-2], kind[-1]
            if to == "f32":
                value = (
                    _signed(x[0], int(source[1:])) if source[0] == "s" else x[0] & np.uint64((1 << int(source[1:])) - 1)
                )
                return _bits(value.astype(np.float64))
            bits = np.uint64((1 << int(source[1:])) - 1)
            return _unsigned(_signed(x[0], int(source[1:])), 64) if source[0] == "s" else x[0] & bits
        if last == "f16x2":
            first, second = _unpacked([x[0]], "f16"), _unpacked([x[1]], "f16")
            result = {"mul": first * second, "add": first + second}[name].astype(np.float16)
            return result.view(np.uint32).reshape(32).astype(np.uint64)
        if last == "f32":
            v = [_f32(y).astype(np.float64) for y in x]
            results = {
                "add": lambda: v[0] + v[1], "sub": lambda: v[0] - v[1], "mul": lambda: v[0] * v[1],
                "fma": lambda: v[0] * v[1] + v[2], "max": lambda: np.maximum(v[0], v[1]),
            }  # fmt: skip
            return _bits(results[name]())
        if name in ("and", "or", "xor"):
            return {"and": x[0] & x[1], "or": x[0] | x[1], "xor": x[0] ^ x[1]}[name]
        if name == "shl":
            return x[0] << x[1]
        if name == "shr":
            if last[0] == "s":
                return _unsigned(_signed(x[0], width) >> x[1].view(np.int64), width)
            return (x[0] & np.uint64((1 << width) - 1)) >> x[1]
        if name == "bfe":
            return (x[0] & _M32) >> x[1] & ((np.uint64(1) << x[2]) - np.uint64(1))
        s = (
            [_signed(y, width) for y in x]
            if last[0] == "s"
            else [(y & np.uint64((1 << width) - 1)).view(np.int64) for y in x]
        )
        if name == "mad" or name == "mul":
            product = s[0] * s[1]
            if kind[1] == "wide":
                return _unsigned(product + (x[2].view(np.int64) if name == "mad" else 0), 64)
            return _unsigned(product + (s[2] if name == "mad" else 0), width)
        results = {
            "add": lambda: s[0] + s[1], "sub": lambda: s[0] - s[1],
            "min": lambda: np.minimum(s[0], s[1]), "max": lambda: np.maximum(s[0], s[1]),
            "div": lambda: (s[0] - np.fmod(s[0], s[1])) // s[1], "rem": lambda: np.fmod(s[0], s[1]),  # towards zero
        }  # fmt: skip
        value = results[name]()
        if "relu" in kind:
            value = np.maximum(value, 0)
        return _unsigned(value, width)
