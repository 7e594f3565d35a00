"""Files of unknown origin are read within bounds, as plain values."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import pandas
import pytest

from vitmnist.runtime.records import UnreadableError, csv_text, read_json, read_yaml

TOO_DEEP = "is nested too deeply", "is not YAML: while increasing flow level"  # the latter from PyYAML 6.0.4 on
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
        ("yaml", b"[" * 51, "is nested too deeply"),
        ("yaml", b"[" * 1_000, "is nested too deeply"),
        ("yaml", b"[" * 100_000, TOO_DEEP),
        ("yaml", b" " * 1_000_001, "is larger than 1 MB"),
        ("yaml", BOMB, "contains a YAML alias or tag"),
        ("yaml", b"a: !!python/object/apply:os.getcwd []", "contains a YAML alias or tag"),
    ],
)
def test_files_beyond_the_bounds_are_refused_in_one_line(
    name: str, content: bytes, reason: str | tuple[str, ...], tmp_path: Path
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


@pytest.mark.parametrize("separator", [",", ";", "\t"])  # what a spreadsheet takes for one depends on its language
@pytest.mark.parametrize("end", ["\r", "\n", "\r\n", "\v", "\x85", "\u2028"])
@pytest.mark.parametrize("formula", ["=1+1", "@SUM(1)", "+1+1", "-1+1"])
def test_no_cell_of_a_table_is_or_becomes_a_formula(formula: str, end: str, separator: str) -> None:
    """However a reader divides the text into lines and cells."""
    texts = [formula, f"cat{end}{formula}", f"{end}{formula}", f" {formula}", f'a"{separator}{formula}', f"\t{formula}"]
    table = csv_text([f"{end}{formula}", "number"], [{f"{end}{formula}": text, "number": -0.5} for text in texts])
    lines = table.splitlines()
    assert lines == table.split("\n")[:-1]
    assert len(lines) == 1 + len(texts)
    for line in lines:
        for cell in next(csv.reader([line], delimiter=separator)):
            assert cell == "-0.5" or not cell.lstrip(' \t"').startswith(formula), line
    rows = list(csv.reader(io.StringIO(table), quoting=csv.QUOTE_NONNUMERIC))
    assert [number for _, number in rows[1:]] == [-0.5] * len(texts)
    assert pandas.read_csv(io.StringIO(table))["number"].tolist() == [-0.5] * len(texts)


def test_texts_are_quoted_and_numbers_are_not() -> None:
    rows = [{"class": 'a "cat", 1', "part": 0.25, "is_last": True, "offset": "-0.5"}, {"class": "1"}]
    table = csv_text(["class", "part", "is_last", "offset"], rows)
    assert table.splitlines() == [
        '"class","part","is_last","offset"',
        '"a ""cat"", 1",0.25,True,"-0.5"',
        '"1","","",""',
    ]
    assert pandas.read_csv(io.StringIO(table))["part"].isna().tolist() == [False, True]
