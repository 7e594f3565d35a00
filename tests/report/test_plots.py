"""The chart: which loader, how much faster, how certain."""

from itertools import combinations, product
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from tests.support.records import compared, epoch, run
from vitmnist.report.plots import PHASES, draw_epoch_times


def drawn(folder: Path) -> Axes:
    figure = draw_epoch_times(compared(folder))
    assert figure
    return figure.axes[0]


def test_bars_are_sorted_by_time_and_say_how_certain_they_are(tmp_path: Path) -> None:
    times = [("disk", 300, 9.0), ("ram", 300, 3.0), ("disk", 100, 4.0), ("ram", 100, 8.0)]
    for index, (loader, size, time) in enumerate(times):
        for repeat in range(8):
            run(tmp_path / f"{index}-{repeat}", loader, size, (9.0, time), config={"repeat": repeat})
    run(tmp_path / "broken", "cache", 100, (9.0, 1.0), status="interrupted", error="SIGTERM")
    axis = drawn(tmp_path)
    texts = [text.get_text() for text in axis.texts]
    assert texts[::2] == ["300, ram", "100, disk", "100, ram", "300, disk", "100, cache"]
    assert texts[1::2] == ["3.00 s, 1×", "4.00 s, 1.33×", "8.00 s, 2.67×", "9.00 s, 3.00×", "1.00 s, not compared"]
    title = "Time per epoch by batch_size, data/loader\nSome CPU, here, mnist"
    assert axis.get_title(loc="left").startswith(title)
    colours = [bar.get_facecolor() for bar in axis.patches[1::3]]
    assert len(set(colours)) == 3
    assert (colours[0], colours[1]) == (colours[2], colours[3]), "a loader has one colour at any batch size"


def test_a_ratio_that_may_be_noise_is_marked(tmp_path: Path) -> None:
    for loader, times in {"ram": (1.0, 1.0, 1.1), "cache": (1.1, 1.0, 1.1), "disk": (2.0, 2.0, 2.2)}.items():
        for repeat, time in enumerate(times):
            run(tmp_path / f"{loader}-{repeat}", loader, times=(9.0, time), config={"repeat": repeat})
    axis = drawn(tmp_path)
    assert [text.get_text() for text in axis.texts[1::2]] == ["1.00 s, 1×", "1.10 s, ≈1.03×", "2.00 s, 2.00×"]
    assert "≈: may be noise" in axis.get_xlabel()


def test_a_bar_is_divided_into_waiting_computing_and_other_as_the_legend_says(tmp_path: Path) -> None:
    run(tmp_path / "0", times=(9.0, 4.0))
    figure = draw_epoch_times(compared(tmp_path))
    assert figure
    bars = figure.axes[0].patches
    assert [bar.get_x() for bar in bars] == pytest.approx([0.0, 0.8, 2.8])
    assert [bar.get_width() for bar in bars] == pytest.approx([0.8, 2.0, 1.2])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == list(PHASES)
    looks = [
        [(bar.get_hatch(), bar.get_fill(), bar.get_alpha()) for bar in part] for part in (bars, legend.get_patches())
    ]
    assert looks[0] == looks[1]
    assert len(set(looks[0])) == 3


def test_phases_never_exceed_the_epoch(tmp_path: Path) -> None:
    """The medians of the parts come from different runs."""
    for repeat, (wait, compute) in enumerate([(0.1, 3.0), (3.0, 0.8), (2.0, 2.0)]):
        epochs = [epoch(4.0, data_wait_s=wait, compute_s=compute) for _ in range(2)]
        run(tmp_path / str(repeat), epochs=epochs, config={"repeat": repeat})
    widths = [bar.get_width() for bar in drawn(tmp_path).patches]
    assert (min(widths), sum(widths)) == (pytest.approx(0.0), pytest.approx(4.0))


def test_a_chart_shows_the_first_hundred_rows(tmp_path: Path) -> None:
    """A PNG of all rows of a large sweep would be too high for matplotlib."""
    for index in range(101):
        run(tmp_path / str(index), times=(9.0, 1.0 + index), config={"model.depth": index})
    assert [text.get_text() for text in drawn(tmp_path).texts[::2]] == [str(index) for index in range(100)]


@pytest.mark.parametrize("rows", [1, 24])
def test_texts_fit_do_not_overlap_and_are_readable_on_a_phone(rows: int, tmp_path: Path) -> None:
    for size in range(rows):
        loader, time = ("disk", 12.0) if size % 3 else ("prefetch", 3.0)
        config = {"model.name": "a long name " * 20}
        epochs = [epoch(time, eval_acc=90.0 + size) for time in (9.0, time)]
        run(tmp_path / str(size), loader, 5000 + size, config=config, epochs=epochs)
    run(tmp_path / "failed", status="failed", error="m" * 200)
    figure = draw_epoch_times(compared(tmp_path))
    assert figure
    figure.draw_without_rendering()
    (legend,), axes = figure.legends, figure.axes
    texts = [text for axis in axes for text in (*axis.texts, axis.xaxis.label, axis._left_title)]
    texts += legend.texts
    boxes = [text.get_window_extent() for text in texts]
    bars = [bar.get_window_extent() for axis in axes for bar in (*axis.patches, *axis.lines)]
    pairs = [*combinations(boxes, 2), *product(boxes, bars)]
    assert not any(box.overlaps(other) for box, other in pairs)
    assert all(figure.bbox.contains(*corner) for box in boxes for corner in (box.min, box.max))
    inches = figure.get_size_inches()[0]
    pixels_on_a_phone = min(text.get_fontsize() for text in texts) / 72 * 360 / inches
    assert pixels_on_a_phone >= 9
    assert all(axis.get_position().width > 0.9 for axis in axes)
