"""TensorBoard scalars without TensorBoard: an event file is a few bytes a scalar, written here by hand.

The usual writers import a whole framework and keep a thread. The format: records of [length: 8 bytes][masked
CRC-32C of the
length: 4][data][masked CRC-32C of the data: 4], little-endian (TensorFlow's lib/io/record_writer.h); data is
    an `Event`
protocol buffer (TensorBoard's compat/proto/event.proto and summary.proto).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_CASTAGNOLI = 0x82F63B78


class ScalarWriter:
    """Appends scalars to a new event file in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "wb")  # noqa: SIM115 (closed by close())
        self._file.write(_record(_event(time.time(), 0, _bytes_field(3, b"brain.Event:2"))))

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Write scalars of one step; names with a slash are grouped by what comes before it."""
        values = b"".join(
            _bytes_field(1, _bytes_field(1, name.encode()) + _float_field(2, value)) for name, value in scalars.items()
        )
        self._file.write(_record(_event(time.time(), step, _bytes_field(5, values))))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked_crc(length)) + data + struct.pack("<I", _masked_crc(data))


def _event(wall_time_s: float, step: int, content: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time_s) + b"\x10" + _varint(step) + content


def _bytes_field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _float_field(number: int, value: float) -> bytes:
    try:
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    except OverflowError:  # beyond float32
        return bytes([number << 3 | 5]) + struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _table() -> list[int]:
    rows = []
    for row in range(256):
        for _ in range(8):
            row = row >> 1 ^ (_CASTAGNOLI if row & 1 else 0)
        rows.append(row)
    return rows


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of `data`."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> int:
    """Return the CRC turned and shifted, as the format wants it: a CRC of data with CRCs in it is weak."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
