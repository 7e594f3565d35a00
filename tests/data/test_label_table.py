"""A table of labels replaces the folders of classes and splits; an error names its line."""

from pathlib import Path

import pytest

from tests.support.image_folders import assert_as_drawn, check_loaders, load, sizes, table
from vitmnist.errors import ConfigError, DataError

COMPOSED, DECOMPOSED = "\xc4rger", "A\u0308rger"


def test_a_table_of_labels_replaces_folders(divided: Path) -> None:
    labels = divided.parent / "labels.csv"
    labels.write_text("\ufeff" + "\n".join(table(divided)))  # as spreadsheets write it
    assert_as_drawn(load(divided, labels=str(labels)), divided)
    rows = table(divided, "label,file")
    labels.write_text("\n".join([rows[0], *(row.replace("eel", "Aal", 1) for row in rows[1:])]))
    pets = load(divided, labels=str(labels), test_share=0.34)
    assert pets.train.classes == ("Aal", "cat", "dog")
    assert sizes(pets) == {"train": 18, "test": 9}
    check_loaders(load(divided, labels=str(labels), test_share=0.1).train.subset(slice(24)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("file,", "path,"), r"labels\.csv:1: has no column file, only path, label, split; .*columns='{file: NAME"),
        (("train/cat/0.png,cat,train", "train/cat/0.png,,train"), r":\d+: has no value in the column label"),
        (("train/cat/0.png,cat,train", ",cat,train"), r":\d+: has no value in the column file"),
        (("0.png,cat,train", "0.png,cat,exam"), r":\d+: split=exam: must be train, val or test"),
        (("train/cat/0.png", "train/cat/no.png"), r"no\.png: cannot be read as an image: No such file"),
        (("train/cat/0.png", "train/cat/1.png"), r":\d+: train/cat/1\.png is in an earlier line too"),
        (("train/cat/0.png", "train/../../cat.png"), r":\d+: train.*cat\.png: must be below data\.dataset\.path"),
        (("train/cat/0.png", "/etc/hosts"), r":\d+: /etc/hosts: must be below data\.dataset\.path"),
        (("cat/0.png,cat,tr", "cat/0.png,cat, wild,tr"), r":\d+: has more fields than the header; quote values"),
        (("test/eel/0.png,eel", "test/eel/0.png,fly"), "the test split has classes .*: fly"),
    ],
)
def test_errors_of_a_table_name_its_line(divided: Path, change: tuple[str, str], message: str) -> None:
    labels = divided.parent / "labels.csv"
    text = "\n".join(table(divided))
    assert change[0] in text
    labels.write_text(text.replace(*change))
    with pytest.raises(DataError, match=message) as caught:
        load(divided, labels=str(labels))
    number = next((n for n, line in enumerate(text.splitlines(), 1) if change[0] in line), 0)
    assert r":\d+: " not in message or f"labels.csv:{number}: " in str(caught.value) or "earlier" in message
    if "No such file" in message:
        assert load(divided, labels=str(labels), skip_unreadable=True).skipped == 1
    for content in (b"file,label\n\xff\xfe,cat", b"", None):
        labels.unlink() if content is None else labels.write_bytes(content)
        with pytest.raises(DataError, match=r"labels\.csv"):
            load(divided, labels=str(labels))


def test_tables_of_other_programs_are_read(divided: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tables have other column names, files without endings, absolute paths, and names that macOS has decomposed."""
    for label in ("cat", "eel"):
        (divided / f"train/{label}/0.png").rename(divided / f"train/{label}/{DECOMPOSED}.png")
    hidden = divided / "train" / "cat" / ".hidden.png"
    (divided / "train" / "cat" / "1.png").rename(hidden)
    labels = divided.parent / "labels.csv"
    rows = [row.replace(".png", "").replace(DECOMPOSED, COMPOSED) for row in table(divided)[1:]]
    rows = [str(divided / row) + ",3" if row.startswith("train/dog") else f"{row},3" for row in rows]
    rows = [" , ".join(row.split(",")) for row in rows[::2]] + rows[1::2]  # blanks around values are ignored
    labels.write_text("\n".join(["image_id, target ,split,part,,", *rows]))
    columns = {"file": "image_id", "label": "target"}
    assert_as_drawn(load(divided, labels=str(labels), columns=columns, suffix=".png"), divided)
    assert "labels.csv: columns that are not used: 'part'" in caplog.text
    labels.write_text(labels.read_text() + f"\ntrain/cat/{DECOMPOSED},cat,train,3")
    with pytest.raises(DataError, match="is in an earlier line too"):
        load(divided, labels=str(labels), columns=columns, suffix=".png")
    with pytest.raises(DataError, match="has no column other, only image_id"):
        load(divided, labels=str(labels), columns={**columns, "split": "other"})
    with pytest.raises(ConfigError, match=r"columns\.lable: there is no such key"):
        load(divided, labels=str(labels), columns={"lable": "target"})
