"""Hostile calibration data and inputs: bombs, depths, texts that are no texts."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from benign import Benign
from cases import case


def repeated(path: Path, block: bytes, times: int, before: bytes = b"", after: bytes = b"") -> Path:
    """A gzip in as many pieces, all but the ends the same: a bomb that is built in no time."""
    path.write_bytes(gzip.compress(before) + gzip.compress(block, 1) * times + gzip.compress(after))
    return path


@case("data")
def one_line_of_gigabytes(folder: Path, _: Benign) -> Path:
    """4 MB of gzip that are 1 GB of one line"""
    return repeated(folder / "text.txt.gz", b"a" * (1 << 24), 64)


@case("data")
def lines_of_gigabytes(folder: Path, _: Benign) -> Path:
    """4 MB of gzip that are 1 GB of short lines"""
    return repeated(folder / "text.txt.gz", b"word\n" * (1 << 22), 51)


@case("data")
def record_of_gigabytes(folder: Path, _: Benign) -> Path:
    """a line of JSON that does not end for a gigabyte"""
    return repeated(folder / "text.jsonl.gz", b"a" * (1 << 24), 64, b'{"text": "', b'"}\n')


@case("data")
def array_of_gigabytes(folder: Path, _: Benign) -> Path:
    """an array of JSON of a gigabyte, in lines"""
    return repeated(folder / "text.json.gz", b'{"text": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},\n' * (1 << 18), 64, b"[\n")


@case("data")
def bomb_in_a_folder(folder: Path, _: Benign) -> None:
    """the same among other files of a folder, which are looked through for text first"""
    (folder / "a.txt").write_text("some text. " * 2000)
    repeated(folder / "b.txt.gz", b"a" * (1 << 24), 64)


@case("data")
def half_a_gzip(folder: Path, _: Benign) -> Path:
    """a gzip that ends in the middle"""
    (folder / "text.txt.gz").write_bytes(gzip.compress(b"some text " * 1000)[:40])
    return folder / "text.txt.gz"


@case("data")
def deep_record(folder: Path, _: Benign) -> Path:
    """a record of 100,000 brackets"""
    (folder / "text.jsonl").write_text('{"text": ' + "[" * 100_000 + "\n")
    return folder / "text.jsonl"


@case("data")
def deep_array(folder: Path, _: Benign) -> Path:
    """an array of 100,000 brackets"""
    (folder / "text.json").write_text("[" * 100_000)
    return folder / "text.json"


@case("data")
def number_of_a_million_digits(folder: Path, _: Benign) -> Path:
    """a record with a number that takes quadratic time to read"""
    (folder / "text.json").write_text('[{"text": 1' + "0" * 1_000_000 + "}]")
    return folder / "text.json"


@case("data")
def not_text(folder: Path, _: Benign) -> Path:
    """bytes that are no UTF-8"""
    (folder / "text.txt").write_bytes(b"\xff\xfe\x00" * 100)
    return folder / "text.txt"


@case("data")
def half_a_pair(folder: Path, _: Benign) -> Path:
    """half of a surrogate pair, which JSON can say and UTF-8 cannot"""
    (folder / "text.jsonl").write_text(json.dumps({"text": "\ud800 " * 2000}) + "\n")
    return folder / "text.jsonl"


@case("data")
def half_a_parquet(folder: Path, _: Benign) -> Path:
    """a Parquet file whose footer says it has 4 GB"""
    (folder / "text.parquet").write_bytes(b"PAR1" + bytes(100) + b"\xff\xff\xff\xff" + b"PAR1")
    return folder / "text.parquet"


@case("data")
def parquet_bomb(folder: Path, _: Benign) -> Path:
    """a Parquet file of a few kB with a cell of 256 MB"""
    return parquet(folder, pyarrow.array(["a" * (1 << 28)]))


@case("data")
def parquet_of_one_cell(folder: Path, _: Benign) -> Path:
    """a Parquet file that is no bomb, with one cell of 64 MB of letters that no compression makes much of"""
    letters = np.random.default_rng(0).integers(97, 113, 1 << 26, dtype=np.uint8).tobytes().decode()
    return parquet(folder, pyarrow.array([letters]))


def parquet(folder: Path, cells: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"text": cells}), folder / "text.parquet", compression="zstd")
    return folder / "text.parquet"


@case("arrays")
def pickled_array(folder: Path, _: Benign) -> Path:
    """a .npz with an array of objects, which is a pickle"""
    np.savez(folder / "x.npz", x=np.array([{"a": 1}], dtype=object))
    return folder / "x.npz"


@case("arrays")
def pickle_called_array(folder: Path, _: Benign) -> Path:
    """a pickle that is called .npz"""
    (folder / "x.npz").write_bytes(pickle.dumps({"x": 1}))
    return folder / "x.npz"


@case("arrays")
def zip_bomb(folder: Path, _: Benign) -> Path:
    """a megabyte of zip that is an array of 256 MB"""
    np.savez_compressed(folder / "x.npz", x=np.zeros((1 << 20, 64), np.float32))
    return folder / "x.npz"


@case("arrays")
def array_that_lies(folder: Path, _: Benign) -> Path:
    """an array that says it has 2^40 rows"""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 64)})
    with zipfile.ZipFile(folder / "x.npz", "w") as file:
        file.writestr("x.npy", head.getvalue())
    return folder / "x.npz"
