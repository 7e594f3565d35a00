"""Files of unknown origin are read within bounds, as plain values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vitmnist.runtime.records import UnreadableError, read_json, read_yaml

BOMB = b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (k, k, k - 1, k - 1) for k in range(98, 123))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("json", b"", "is not JSON: Expecting value"),
        ("json", b"\xff\xfe", "is not text: 'utf-8' codec can't decode"),
        ("json", b"[" * 100_000, "is nested too deeply"),
        ("json", b" " * 4_000_001, "is larger than 4 MB"),
        ("yaml", b"a: [", "is not YAML: "),
        ("yaml", b"a: 2024-13-01", "is not YAML: month must be in 1..12"),
        ("yaml", b"a: 2024-12-01", "is not YAML: Object of type date is not JSON"),
        ("yaml", b"[" * 100_000, "is nested too deeply"),
        ("yaml", b" " * 1_000_001, "is larger than 1 MB"),
        ("yaml", BOMB, "contains a YAML alias or tag"),
        ("yaml", b"a: !!python/object/apply:os.getcwd []", "contains a YAML alias or tag"),
    ],
)
def test_files_beyond_the_bounds_are_refused_in_one_line(
    name: str, content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UnreadableError) as raised:
        {"json": read_json, "yaml": read_yaml}[name](tmp_path / "file")
    assert str(raised.value).startswith(reason)
    assert "\n" not in str(raised.value)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for a writer
    (tmp_path / "link").symlink_to("/dev/zero")
    for read in (read_json, read_yaml):
        for path in (tmp_path, tmp_path / "fifo", tmp_path / "link"):
            with pytest.raises(UnreadableError, match="is not a regular file"):
                read(path)
        for path in (tmp_path / "missing", tmp_path / "fifo" / "below"):
            with pytest.raises(FileNotFoundError):
                read(path)


def test_interpolations_stay_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a: ${oc.env:HOME}\nb: {c: 0.5, d: [1, true, null]}\n")
    assert read_yaml(tmp_path / "file") == {"a": "${oc.env:HOME}", "b": {"c": 0.5, "d": [1, True, None]}}
