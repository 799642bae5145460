"""What torch.save writes, checked before torch.load reads it: a zip of one pickle and of data that are mapped.

``weights_only=True`` runs no code from a pickle, but still calls what it allows: ``bytearray(10**12)`` takes a
terabyte, and so does a deflated record. So the zip must hold plain bytes where it says, its pickle may only name
tensors and containers, and torch finds the same records as we do, whichever way it looks.
"""

from __future__ import annotations

import pickletools
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from plaid_tilemaxsim.index.checks import check_file, invalid

# The directory, and each record that is read rather than mapped. torch.save needs a few hundred bytes for a tensor.
SMALL = 1 << 16
BLOCK = 1 << 22
# Ends of a zip (APPNOTE.TXT 4.3): directory entry, local header, and the three that close the file.
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_STORAGES = ("Half", "Float", "Double", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
_GLOBALS = {
    "torch._utils _rebuild_tensor_v2",
    "collections OrderedDict",
    *(f"torch {name}Storage" for name in _STORAGES),
}
_OPCODES = {
    "PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BINPERSID", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
    "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "EMPTY_LIST", "APPEND", "APPENDS",
    "EMPTY_DICT", "SETITEM", "SETITEMS",
}  # fmt: skip
# Records that are mapped; torch reads all others into memory.
_MAPPED = re.compile(r"[^/]+/data/\d+")


@dataclass(frozen=True)
class Record:
    """Bytes offset .. offset + size - 1 of the file."""

    name: str
    offset: int
    size: int
    crc: int


def read_records(file: Path) -> list[Record]:
    """The records of a file of torch.save, none of whose data have been read. Raises ValueError for any other file."""
    check_file(file)
    try:
        with file.open("rb") as data:
            records = _read_directory(data)
            for record in records:
                if not _MAPPED.fullmatch(record.name) and record.name.lower().endswith(".pkl"):
                    _check_pickle(_at(data, record.offset, record.size))
    except (ValueError, OverflowError, OSError, struct.error) as error:
        raise invalid(file, "content", "tensors as torch.save writes them", f"{error}"[:200]) from error
    return records


def check_sums(file: Path) -> None:
    """Reads all of a file of torch.save; ValueError where data are not those of its CRC-32."""
    records = read_records(file)
    with file.open("rb") as data:
        for record in records:
            data.seek(record.offset)
            crc, left = 0, record.size
            while left and (block := data.read(min(left, BLOCK))):
                crc, left = zlib.crc32(block, crc), left - len(block)
            if crc != record.crc:
                raise invalid(file, record.name, f"data of CRC-32 {record.crc:08x}", f"{crc:08x}")


def _read_directory(data: BinaryIO) -> list[Record]:
    """Strict, since zip readers differ in what they make of a sloppy one."""
    size = data.seek(0, 2)
    end = size - _END.size
    closing = _unpack(data, _END, end, b"PK\5\6", "its end")
    count, length, start = closing[4:7]
    if closing[1:3] != (0, 0) or closing[7] != 0:
        raise ValueError("a zip with a comment, or of several parts")
    if end >= _LOCATOR.size and _at(data, end - _LOCATOR.size, 4) == b"PK\6\7":
        end -= _LOCATOR.size + _END64.size
        locator = _unpack(data, _LOCATOR, end + _END64.size, b"PK\6\7", "its end")
        closing = _unpack(data, _END64, end, b"PK\6\6", "its end")
        if locator[1:] != (0, end, 1) or closing[1] != _END64.size - 12 or closing[4:6] != (0, 0):
            raise ValueError("a zip whose ends disagree")
        count, length, start = closing[7:]
    if length > SMALL or start + length != end:
        raise ValueError(
            f"a zip whose directory of {length} bytes at {start} does not end where the file does, at {end}"
        )

    records: list[Record] = []
    directory = _at(data, start, length)
    at = 0
    while at < length:
        if len(records) == count:
            raise ValueError(f"a zip of more than the {count} records that it states")
        fields = _ENTRY.unpack_from(directory, at)
        flags, method, crc, packed, plain = fields[3], fields[4], fields[7], fields[8], fields[9]
        ends = [at + _ENTRY.size]
        for part in fields[10:13]:  # name, extra fields, comment
            ends.append(ends[-1] + part)
        name = directory[ends[0] : ends[1]].decode()
        plain, packed, offset = _sizes64(directory[ends[1] : ends[2]], plain, packed, fields[16])
        at = ends[-1]
        if fields[0] != b"PK\1\2" or at > length or method != 0 or flags & 1 or packed != plain:
            raise ValueError(f"the record {name[:80]!r} compressed, encrypted or cut")
        local = _unpack(data, _LOCAL, offset, b"PK\3\4", f"the record {name[:80]!r}")
        offset += _LOCAL.size + local[9] + local[10]
        if offset + plain > start:
            raise ValueError(f"the record {name[:80]!r} of {plain} bytes at {offset} of {start}")
        if plain > SMALL and not _MAPPED.fullmatch(name):
            raise ValueError(f"the record {name[:80]!r} of {plain} bytes, of at most {SMALL}")
        records.append(Record(name, offset, plain, crc))
    if len(records) != count:
        raise ValueError(f"a zip of {len(records)} records, {count} stated")
    # torch looks a name up without regard to case, under the folder of the first record.
    names = {record.name.lower() for record in records}
    if len(names) != len(records) or len({name.partition("/")[0] for name in names}) > 1:
        raise ValueError("records of the same name, or of several folders")
    return records


def _sizes64(extra: bytes, plain: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The three numbers of a directory entry, those of 64 bits from its extra field 1."""
    wide = b""
    at = 0
    while at < len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + length]
            break
        at += 4 + length
    values = []
    for value in (plain, packed, offset):
        if value == 0xFFFFFFFF:
            value, wide = struct.unpack_from("<Q", wide)[0], wide[8:]
        values.append(value)
    return values[0], values[1], values[2]


def _unpack(data: BinaryIO, form: struct.Struct, offset: int, signature: bytes, what: str) -> tuple[Any, ...]:
    fields = form.unpack(_at(data, offset, form.size)) if offset >= 0 else (b"",)
    if fields[0] != signature:
        raise ValueError(f"no zip: {what} is missing")
    return fields


def _at(data: BinaryIO, offset: int, length: int) -> bytes:
    data.seek(offset)
    return data.read(length)


def _check_pickle(pickled: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name not in _OPCODES or (opcode.name == "GLOBAL" and argument not in _GLOBALS):
            what = f"{opcode.name} {argument}" if argument is not None else opcode.name
            raise ValueError(f"a pickle with {what[:120]}")
