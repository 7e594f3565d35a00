"""Files of unknown origin are read as plain values."""

import io
import multiprocessing
from pathlib import Path

import pytest

from vitmnist.runtime.files import UnreadableError, encode_csv, read_json_or_yaml, write_atomic


def test_yaml_constructs_no_objects(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("a: !!python/object/apply:os.getcwd []")
    with pytest.raises(UnreadableError, match=r"^is not YAML: could not determine a constructor.*$"):
        read_json_or_yaml(tmp_path / "file.yaml")


def test_texts_are_quoted_and_numbers_are_not() -> None:
    import pandas

    rows = [{"class": 'a "cat", 1', "part": 0.25, "is_last": True, "offset": "-0.5"}, {"class": "1"}]
    table = encode_csv(["class", "part", "is_last", "offset"], rows)
    assert table.splitlines() == [
        '"class","part","is_last","offset"',
        '"a ""cat"", 1",0.25,True,"-0.5"',
        '"1","","",""',
    ]
    assert pandas.read_csv(io.StringIO(table))["part"].isna().tolist() == [False, True]


def write_often(path: Path) -> None:
    for count in range(200):
        write_atomic(path, b"x" * (1000 + count))


def test_two_processes_may_write_a_file(tmp_path: Path) -> None:
    writers = [multiprocessing.get_context("spawn").Process(target=write_often, args=(tmp_path / "a",)) for _ in "12"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
