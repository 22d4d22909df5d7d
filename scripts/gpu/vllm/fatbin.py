"""Removes from a compiled CUDA extension the machine code that a given GPU never loads: the file compresses well then.

    python3 fatbin.py INPUT.so OUTPUT.so --arch 90 [--ptx] [--list]

An extension holds its GPU code in the ELF section `.nv_fatbin`: containers, one for each source file, with one entry
for each GPU architecture (machine code) or virtual architecture (PTX). The driver picks one entry of each container by
the entries' headers. What stays here, byte for byte:

- machine code for the wanted architecture (90 includes 90a: both have the number 90);
- with --ptx, PTX for at most that architecture, where a container has no machine code for it (the driver compiles it);
- in a container with neither, the file's smallest entry for another architecture, so that no container is empty: the
  kernels of such a container do not run on that GPU.

What stays is moved to the front of its container, whose header gets the new size; the rest becomes zeros. Containers
stay where they are, so nothing else in the file changes.
"""

from __future__ import annotations

import argparse
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
SIZE_AT = 8
"""Offset of the size of all entries in a container's header"""


@dataclass(frozen=True)
class Entry:
    """One entry of a container: what it is, and where it lies with its header."""

    kind: int
    arch: int
    start: int
    size: int


@dataclass(frozen=True)
class Container:
    """The code of one source file."""

    start: int
    header: int
    size: int
    entries: list[Entry]


def section(data: bytes | bytearray, name: str) -> tuple[int, int]:
    """Return offset and size of an ELF section of a 64-bit little-endian file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    width, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + number * width) for number in range(count)]
    strings = headers[names][4]
    for header in headers:
        begin = strings + header[0]
        if data[begin : data.index(b"\0", begin)] == name.encode():
            return header[4], header[5]
    raise ValueError(f"no section {name}")


def containers(data: bytes | bytearray) -> Iterator[Container]:
    """Yield all containers."""
    offset, size = section(data, ".nv_fatbin")
    place, end = offset, offset + size
    while place < end:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, place)
        if magic != MAGIC:  # padding between containers
            place += 8
            continue
        entries, inner, stop = [], place + header, place + header + length
        while inner < stop:
            kind, _, head, payload = struct.unpack_from("<HHIQ", data, inner)
            (arch,) = struct.unpack_from("<I", data, inner + 28)
            entries.append(Entry(kind, arch, inner, head + payload))
            inner += head + payload
        yield Container(place, header, length, entries)
        place = stop


def needed(entries: list[Entry], arch: int, *, ptx: bool) -> list[Entry]:
    """Return the entries that a GPU of `arch` loads."""
    code = [one for one in entries if one.kind == CUBIN and one.arch == arch]
    return code or [one for one in entries if ptx and one.kind == PTX and one.arch <= arch]


def prune(data: bytearray, arch: int, *, ptx: bool) -> Counter[str]:
    """Remove what is not needed, in place. Returns the bytes kept and removed by kind and architecture."""
    bytes_of: Counter[str] = Counter()
    found = [one for one in containers(data) if one.entries]
    others = (one for container in found for one in container.entries if one.kind == CUBIN and one.arch != arch)
    filler = min(others, key=lambda one: one.size, default=None)
    spare = b"" if filler is None else bytes(data[filler.start : filler.start + filler.size])
    for container in found:
        kept = needed(container.entries, arch, ptx=ptx)
        for entry in container.entries:
            kind = {PTX: "ptx", CUBIN: "cubin"}.get(entry.kind, f"kind{entry.kind}")
            bytes_of[f"{'kept' if entry in kept else 'removed'} {kind} {entry.arch}"] += entry.size
        body = b"".join(bytes(data[one.start : one.start + one.size]) for one in kept) or spare
        begin = container.start + container.header
        data[begin : begin + container.size] = body + bytes(container.size - len(body))
        struct.pack_into("<Q", data, container.start + SIZE_AT, len(body))
    return bytes_of


def main() -> None:
    """Prune one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--ptx", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    data = bytearray(args.input.read_bytes())
    found = prune(data, args.arch, ptx=args.ptx)
    args.output.write_bytes(data)
    args.output.chmod(0o755)
    if args.list:
        for name, size in sorted(found.items()):
            print(f"{name:20} {size / 2**20:8.2f} MiB")


if __name__ == "__main__":
    main()
