"""IDX archives are verified by their content, and never unpacked beyond the size that the header states."""

from __future__ import annotations

import gzip
import hashlib
import logging
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from torchvision import datasets as torchvision_datasets

from tests.conftest import write_mnist_like
from vitmnist.data.datasets import Dataset, load_dataset, mnist
from vitmnist.data.datasets.idx import IdxFile
from vitmnist.data.datasets.mnist import FILES
from vitmnist.errors import DataError


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def pack(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content, compresslevel=1))


@pytest.fixture
def contents(tmp_path: Path) -> dict[str, bytes]:
    """The content of four small files, which are packed in `tmp_path`."""
    write_mnist_like(tmp_path / "unpacked")
    contents = {name: (tmp_path / "unpacked" / name).read_bytes() for name in FILES}
    pack(tmp_path, contents)
    return contents


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_that_was_compressed_again_is_verified_by_its_content(
    tmp_path: Path,
    contents: dict[str, bytes],
    tiny: Dataset,
    packed: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(mnist.CONTENT_SHA256, "FashionMNIST", tuple(map(sha256, contents.values())))
    root = tmp_path if packed else tmp_path / "unpacked"
    with caplog.at_level(logging.INFO):
        fashion = load_dataset("fashion_mnist", root=str(root))
    assert torch.equal(fashion.train.images, tiny.train.images)
    assert caplog.text.count("compressed by someone else, content verified") == (4 if packed else 0)
    assert caplog.text.count("content verified") == 4
    assert "no known checksum" not in caplog.text
    assert fashion.train.open_reader()[0].size == (28, 28)


def test_the_checksums_of_contents_are_those_of_the_bundled_files(tmp_path: Path) -> None:
    for name, content_sha256 in zip(FILES, mnist.CONTENT_SHA256["MNIST"], strict=True):
        assert sha256(gzip.decompress((mnist.BUNDLED_MNIST / f"{name}.gz").read_bytes())) == content_sha256


@pytest.mark.parametrize("name", ["fashion_mnist", "kmnist"])
def test_unknown_content_is_used_with_a_warning_that_has_its_checksum(
    tmp_path: Path, contents: dict[str, bytes], name: str, tiny: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    assert torch.equal(load_dataset(name, root=str(tmp_path)).test.images, tiny.test.images)
    for content in contents.values():
        assert f"content unknown, sha256 {sha256(content)}" in caplog.text
    assert "damaged" not in caplog.text


def test_the_published_archive_needs_no_remark(
    tmp_path: Path, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    md5 = [(f"{name}.gz", hashlib.md5((tmp_path / f"{name}.gz").read_bytes()).hexdigest()) for name in FILES]
    monkeypatch.setattr(torchvision_datasets.KMNIST, "resources", md5)
    with caplog.at_level(logging.INFO):
        load_dataset("kmnist", root=str(tmp_path))
    assert "content" not in caplog.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda archive: archive[:-9], "is damaged: expected md5 0, found [0-9a-f]{32}"),
        (lambda archive: archive[:40] + bytes([archive[40] ^ 255]) + archive[41:], "is damaged: expected md5 0"),
        (lambda archive: b"no archive", "is damaged: expected md5 0"),
        (lambda archive: gzip.compress(gzip.decompress(archive)[:-1]), "promises 31 bytes, it has 30"),
        (lambda archive: gzip.compress(gzip.decompress(archive) + b"\0"), "promises 31 bytes, it has more"),
        (lambda archive: gzip.compress(b"PK\3\4"), "is not an IDX file of bytes: it begins with 50 4b 03 04"),
    ],
)
def test_what_cannot_be_unpacked_or_parsed_is_damaged(
    tmp_path: Path, contents: dict[str, bytes], damage: object, message: str
) -> None:
    path = tmp_path / f"{FILES[1]}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        IdxFile(path, "md5:0", tmp_path / FILES[1]).read()


def test_no_more_is_unpacked_than_the_header_promises(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    file = IdxFile(path, "md5:0", tmp_path / "bomb")
    header = struct.pack(">HBBI", 0, 8, 1, 1000)
    path.write_bytes(gzip.compress(header + bytes(50_000_000), compresslevel=1))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="promises 1008 bytes, it has more"):
            file.read()
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    path.write_bytes(gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 2**31, 2**31, 2**31)))
    with pytest.raises(DataError, match=r"bomb\.gz is damaged: its header promises \d{28} bytes"):
        file.read()
