"""Changes one file of an input: bytes, values of JSON and YAML, headers of arrays, zip members."""

from __future__ import annotations

import ast
import gzip
import io
import json
import lzma
import os
import re
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import yaml
import zstandard

Mutation: TypeAlias = Callable[[bytes, Random], bytes]

LONG = 3_000_000
NUMBERS = ("1e400", "-1", "0", "9" * 30, "9" * 5000, "nan", "inf", "-0.0", "1e-320", "0x10", "٣")
FRAGMENTS = (
    b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\r\n", b"\n", b"\n\n",
    b"\t", b" ", b" ||| ", b"\xe2\x80\xa8", b"\x1b[31m", b"-", b":", b",", b"{", b"}", b"[" * 50,
    b'"', b"\\", b"\\ud800", b"..", b"/", b"%s", b"#", b"<", b"&x;", b"\xe2\x80\xae", b"=cmd|x",
)  # fmt: skip
# What YAML allows and few expect.
YAML_LINES = (
    "<<: *x", "a: &a [*a]", "? [1, 2]\n: x", "---\nx: 1", "!!python/object:os.system {}", "x: 0o17",
    "x: 2001-01-01", "%YAML 9.9", "x: !!binary aGk=", "seed: .nan", "\tx: 1", "seed: 1_000",
    "a: &a [x]\nb: &b [*a,*a]\nc: &c [*b,*b]", "seed: 190:20:30",
)  # fmt: skip
SHAPES = (
    (), (0,), (0, 0), (1,), (10**9, 10**9), (2**62,), (-1, 32), (25,), (25, 32, 1), (5, 5),
    (10**10,), (2**31, 32), (1, 800), (800, 1), (26, 32), (True,), (1.5,),
)  # fmt: skip
ARRAY_TYPES = (
    "<f8", "<f2", "<i4", "<i8", ">f4", "|O", "<U5", "|S4", "<c8", "|b1", "V8", "x", "<M8[s]", "<u2",
    "<f4", "|V0",
)  # fmt: skip
HEADERS = ("{}", "(" * 500, "x", "{'descr': '<f4'}", "__import__('os')", "[" * 20_000, "{**{}}")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 10**7, 0.5, -0.0,
    float("nan"), float("inf"), 1e308, "", "x", "1", "../../x", "/etc/passwd", "a\nb", "\x1b[31m",
    "\ud800", "\0", "é" * 300, "x" * 100_000, [], {}, [[]], [None], {"x": 1}, [1, 2, 3], ["x"] * 3,
    "nan", "float64", "<f8", "|O",
)  # fmt: skip
KEYS = (
    "quantization_config",
    "auto_map",
    "extends",
    "x",
    "dtype",
    "calque",
    "version",
    "__class__",
)


def flip(content: bytes, rng: Random) -> bytes:
    """Change a few bits."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def delete(content: bytes, rng: Random) -> bytes:
    start, end = _cut(content, rng)
    return content[:start] + content[end:]


def insert(content: bytes, rng: Random) -> bytes:
    start = rng.randint(0, len(content))
    piece = rng.choice((*FRAGMENTS, rng.randbytes(rng.randint(1, 20))))
    return content[:start] + piece + content[start:]


def duplicate(content: bytes, rng: Random) -> bytes:
    start, end = _cut(content, rng)
    return content[:end] + content[start:]


def truncate(content: bytes, rng: Random) -> bytes:
    return content[: rng.randrange(len(content))] if content else content


def splice(content: bytes, rng: Random) -> bytes:
    """Copy a part over another place."""
    start, end = _cut(content, rng)
    place = rng.randint(0, len(content))
    return content[:place] + content[start:end] + content[place + end - start :]


def zero(content: bytes, rng: Random) -> bytes:
    start, end = _cut(content, rng)
    return content[:start] + bytes(end - start) + content[end:]


def empty(content: bytes, rng: Random) -> bytes:
    return rng.choice((b"", b"", b"\n", b"\0", b" \n", b"null", b"{}", b"[]"))


def double(content: bytes, rng: Random) -> bytes:
    return content + content


def noise(content: bytes, rng: Random) -> bytes:
    return rng.randbytes(rng.randint(1, 2000))


def carriage_returns(content: bytes, rng: Random) -> bytes:
    return content.replace(b"\n", rng.choice((b"\r", b"\r\n", b"\r\r\n")))


def reencode(content: bytes, rng: Random) -> bytes:
    """Write text in another encoding, or with a mark of the byte order."""
    text = content.decode("utf-8", "replace")
    encoding = rng.choice(("utf-16", "utf-32-le", "latin-1", "utf-8-sig", "cp1252"))
    return text.encode(encoding, "replace")


def long_line(content: bytes, rng: Random) -> bytes:
    """Insert a long word, a line of many words, or many empty lines."""
    start = rng.randint(0, len(content))
    piece = rng.choice((b"a", b"a ", b"\n", b"1-1 ", b"[", b"9"))
    n_pieces = 2000 if piece == b"\n" else LONG // len(piece)  # a few lines are a block here
    return content[:start] + piece * n_pieces + content[start:]


def swap_lines(content: bytes, rng: Random) -> bytes:
    lines = content.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines)


def change_line(content: bytes, rng: Random) -> bytes:
    """Remove, repeat, empty or shorten one line."""
    lines = content.splitlines(keepends=True)
    if not lines:
        return content
    n = rng.randrange(len(lines))
    columns = lines[n].split(b"\t")
    lines[n] = rng.choice(
        (b"", lines[n] * 2, b"\n", b"\t".join(columns[:-1]) + b"\n", b"\t".join(columns[::-1]),
         lines[n].strip(), b"\t\t\t\t" + lines[n], b"#" + lines[n])
    )  # fmt: skip
    return b"".join(lines)


def number(content: bytes, rng: Random) -> bytes:
    """Replace a run of digits by another number."""
    runs = _digit_runs(content)
    if not runs:
        return content
    start, end = rng.choice(runs)
    return content[:start] + rng.choice(NUMBERS).encode() + content[end:]


BYTES: tuple[Mutation, ...] = (
    flip, flip, delete, insert, insert, duplicate, truncate, splice, zero, empty, double, noise,
)  # fmt: skip
LINES: tuple[Mutation, ...] = (
    carriage_returns, reencode, long_line, swap_lines, change_line, change_line, number, number,
)  # fmt: skip


def strange_value(rng: Random, old: Any) -> Any:
    """Return a value of another type or of another magnitude."""
    values = [*VALUES, [old], {"": old}, _nest(5000)]
    if isinstance(old, int | float) and not isinstance(old, bool):
        values += [old + 1, old - 1, -old, old * 2, old * 1000, float(old), str(old)] * 3
    if isinstance(old, str):
        values += [old[:-1], old + "x", old.upper(), old[::-1], old * 2] * 3
    if isinstance(old, list):
        values += [old[:-1], old * 2, old[::-1], [*old, None], [*old, old]] * 3
    return deepcopy(rng.choice(values))


def change_tree(tree: Any, rng: Random) -> Any:
    """Replace, remove, rename or add one value somewhere in nested lists and dictionaries."""
    tree = deepcopy(tree)
    places = list(_places(tree))
    if not places:
        return strange_value(rng, tree)
    owner, key = rng.choice(places)
    how = rng.choice(("replace", "replace", "replace", "remove", "rename", "add"))
    if how == "replace":
        owner[key] = strange_value(rng, owner[key])
    elif how == "remove":
        del owner[key]
    elif isinstance(owner, list):
        owner.insert(key, strange_value(rng, owner[key]))
    elif how == "rename":
        owner[rng.choice(("x", "", str(key) + " ", "__class__", "\ud800"))] = owner.pop(key)
    else:
        owner[rng.choice(KEYS)] = strange_value(rng, owner[key])
    return tree


def json_value(content: bytes, rng: Random) -> bytes:
    """Change one value of a JSON file, or repeat a key."""
    tree = json.loads(content)
    if isinstance(tree, dict) and rng.random() < 0.05:
        key = json.dumps(rng.choice([*tree, "x"]))
        return b"{" + f"{key}: 1, ".encode() + content.lstrip()[1:]
    return _dump_json(change_tree(tree, rng))


def json_lines(content: bytes, rng: Random) -> bytes:
    """Change one value of one line of a file of JSON lines."""
    lines = content.splitlines()
    n = rng.randrange(len(lines))
    lines[n] = _dump_json(change_tree(json.loads(lines[n]), rng))
    return b"\n".join(lines) + b"\n"


def yaml_value(content: bytes, rng: Random) -> bytes:
    """Change one value of a YAML file, or add a line."""
    if rng.random() < 0.15:
        return content + f"\n{rng.choice(YAML_LINES)}\n".encode()
    text = _dump_json(change_tree(yaml.safe_load(content), rng)).decode()
    return text.replace("NaN", ".nan").replace("Infinity", ".inf").encode()


def npy_header(content: bytes, rng: Random) -> bytes:
    """Change shape, type or order in the header of a NumPy array, or write something else there."""
    size = struct.unpack("<H", content[8:10])[0]
    header = ast.literal_eval(content[10 : 10 + size].decode())
    changes = {"shape": rng.choice(SHAPES), "descr": rng.choice(ARRAY_TYPES), "fortran_order": True}
    key = rng.choice((*changes, "text"))
    text = rng.choice(HEADERS) if key == "text" else repr(header | {key: changes[key]})
    raw = text.encode() + b"\n"
    version, length = (b"\1\0", "<H") if len(raw) < 65536 else (b"\2\0", "<I")
    return content[:6] + version + struct.pack(length, len(raw)) + raw + content[10 + size :]


def safetensors_header(content: bytes, rng: Random) -> bytes:
    """Change one value of the header of a safetensors file, or its length."""
    size = struct.unpack("<Q", content[:8])[0]
    if rng.random() < 0.15:
        other = rng.choice((0, 1, size - 1, size + 1, 2**63, 2**64 - 1, 100_000_000, 100_000_001))
        return struct.pack("<Q", other) + content[8:]
    header = _dump_json(change_tree(json.loads(content[8 : 8 + size]), rng))
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def safetensors_weights(content: bytes, rng: Random) -> bytes:
    """Write NaN, Inf or a huge number into the weights."""
    start = 8 + struct.unpack("<Q", content[:8])[0]
    n_numbers = (len(content) - start) // 4
    place = start + 4 * rng.randrange(max(1, n_numbers))
    value = struct.pack("<f", rng.choice((float("nan"), float("inf"), -float("inf"), 3e38)))
    return content[:place] + value + content[place + 4 :]


def zip_member(content: bytes, rng: Random) -> bytes:
    """Change, rename, repeat, remove or add a member of a zip file."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    n = rng.randrange(len(members))
    name, data = members[n]
    how = rng.choice(("bytes", "header", "header", "rename", "repeat", "remove", "bomb", "text"))
    if how == "bytes":
        members[n] = name, rng.choice(BYTES)(data, rng)
    elif how == "header":
        members[n] = name, npy_header(data, rng)
    elif how == "rename":
        members[n] = rng.choice(("../x.npy", "/x.npy", "x", "", "en.num.npy", "\ud83d.npy")), data
    elif how == "repeat":
        members.append((name, data))
    elif how == "remove":
        del members[n]
    elif how == "bomb":
        members[n] = name, data[:128] + bytes(50_000_000)
    else:
        members[n] = name, b"no array"
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")
        for name, data in members:
            archive.writestr(name.encode("utf-8", "replace").decode() or "x", data)
    return buffer.getvalue()


# By suffix: mutations that keep the format, besides those of bytes.
STRUCTURED: dict[str, tuple[Mutation, ...]] = {
    ".json": (json_value,) * 24 + LINES,
    ".jsonl": (json_lines,) * 12 + LINES,
    ".journal": (json_lines,) * 12 + LINES,
    ".yaml": (yaml_value,) * 24 + LINES,
    ".npy": (npy_header,) * 8,
    ".npz": (zip_member,) * 12,
    ".safetensors": (safetensors_header,) * 8 + (safetensors_weights,) * 6,
    ".bin": (number,),
    ".f32": (),
    ".forward": LINES,
    ".backward": LINES,
}
OPEN_AND_CLOSE: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    ".gz": (gzip.decompress, gzip.compress),
    ".xz": (lzma.decompress, lzma.compress),
    ".zst": (zstandard.decompress, zstandard.compress),
}
BOMB_BYTES = 400 << 20


def mutate_content(path: Path, content: bytes, rng: Random) -> tuple[str, bytes]:
    """Return the names of one or more mutations and what they make of the content of a file."""
    if path.suffix in OPEN_AND_CLOSE and rng.random() < 0.02:
        return "bomb", _make_bomb(path.suffix, rng.choice((b"a", b"a ", b"\0")))
    if path.suffix in OPEN_AND_CLOSE and rng.random() < 0.5:
        decompress, compress = OPEN_AND_CLOSE[path.suffix]
        names, inner = mutate_content(path.with_suffix(""), decompress(content), rng)
        return f"{names} inside", compress(inner)
    mutations = BYTES + STRUCTURED.get(path.suffix, LINES)
    names = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutation = rng.choice(mutations)
        names.append(mutation.__name__)
        try:
            content = mutation(content, rng)
        except Exception:  # noqa: BLE001
            continue  # an earlier mutation has destroyed the structure
    return "+".join(names), content


def mutate_file(path: Path, rng: Random) -> str:
    """Change a file in place and return the names of the mutations."""
    if rng.random() < 0.04:
        how = rng.choice(("missing", "folder", "link to nowhere", "link to itself", "unreadable"))
        if how == "unreadable" and os.geteuid() == 0:
            how = "missing"  # permissions do not apply to root
        content = path.read_bytes()
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how.startswith("link"):
            path.symlink_to("nowhere" if how == "link to nowhere" else path.name)
        elif how == "unreadable":
            path.write_bytes(content)
            path.chmod(0)
        return how
    names, content = mutate_content(path, path.read_bytes(), rng)
    path.unlink()  # it may be a hard link
    path.write_bytes(content)
    return names


def copy_tree(source: Path, target: Path, *, link: bool) -> None:
    """Copy a file or folder; with `link`, files that will not be written are hard links."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link if link else shutil.copy2)
    else:
        (os.link if link else shutil.copy2)(source, target)


@cache
def _make_bomb(suffix: str, piece: bytes) -> bytes:
    """Return a small compressed file of one long line."""
    compressors: dict[str, Any] = {
        ".gz": zlib.compressobj(1, wbits=31),
        ".xz": lzma.LZMACompressor(preset=0),
        ".zst": zstandard.ZstdCompressor(1).compressobj(),
    }
    part = piece * ((1 << 20) // len(piece))
    parts = [compressors[suffix].compress(part) for _ in range(BOMB_BYTES // len(part))]
    return b"".join([*parts, compressors[suffix].flush()])


def _cut(content: bytes, rng: Random) -> tuple[int, int]:
    start = rng.randint(0, len(content))
    length = rng.choice((1, 2, 8, 64, max(1, len(content) // 4)))
    return start, min(len(content), start + length)


def _digit_runs(content: bytes) -> list[tuple[int, int]]:
    return [found.span() for found in re.finditer(rb"\d+(\.\d+)?", content[:200_000])]


def _nest(depth: int) -> Any:
    value: Any = "leaf"
    for _ in range(depth):
        value = [value]
    return value


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all (owner, key) in nested lists and dictionaries; of long lists only some."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in list(keys)[:40]:
        yield tree, key
        yield from _places(tree[key])


def _dump_json(tree: Any) -> bytes:
    """Write JSON of any depth; surrogates, NaN and Infinity as Python writes them."""
    depth = 0
    while isinstance(tree, list) and len(tree) == 1:
        depth, tree = depth + 1, tree[0]
    if isinstance(tree, dict):
        entries = (json.dumps(str(key)).encode() + b": " + _dump_json(tree[key]) for key in tree)
        text = b"{" + b", ".join(entries) + b"}"
    elif isinstance(tree, list):
        text = b"[" + b", ".join(map(_dump_json, tree)) + b"]"
    elif isinstance(tree, int) and tree > 10**100:  # Python refuses to write it
        text = b"1" + b"0" * 400
    else:
        text = json.dumps(tree).encode()
    return b"[" * depth + text + b"]" * depth
