"""The panels: which configuration is best, how fast it is, how certain that is, and how the loss fell."""

from itertools import combinations, product
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure

from tests.support.records import epoch, the_only, write_run
from vitmnist.report.plots import MAX_ROWS, PHASES, STYLE, draw_figures

QUALITY, TIMES, LOSSES = "Test accuracy, %", "Seconds per epoch", "Test loss"


def figures(folder: Path) -> dict[str, Figure]:
    shown: dict[str, Figure] = {}
    with rc_context(fname=STYLE):
        for figure in draw_figures(the_only(folder)):
            shown[figure.get_suptitle()] = figure
    return shown


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_bars_are_sorted_by_setting_and_time_and_say_how_certain_they_are(tmp_path: Path) -> None:
    times = {("cache", 100): 3.0, ("ram", 100): 8.0, ("ram", 300): 3.01, ("disk", 300): 9.0}
    for (loader, size), time in times.items():
        for repeat in range(3):
            config = {"repeat": repeat}
            write_run(tmp_path / f"{loader}-{size}-{repeat}", loader, size, (9.0, time + repeat / 100), config=config)
    write_run(tmp_path / "once", "cache", 300, (9.0, 12.0))
    shown = figures(tmp_path)
    assert [*shown] == [TIMES], "the accuracy does not differ"
    assert texts(shown[TIMES]) == [
        *("batch_size=100", "cache", "3.01 s, 1×", "ram", "8.01 s, 2.66×"),
        *("batch_size=300", "ram", "3.02 s, 1×", "disk", "9.01 s, 2.98×", "cache", "12.0 s"),
    ], "each batch size has a heading and a baseline; one round has no ratio"


def test_a_ratio_that_may_be_noise_is_left_out(tmp_path: Path) -> None:
    for loader, times in {"ram": (1.0, 1.0, 1.1), "cache": (1.1, 1.0, 1.1), "disk": (2.0, 2.0, 2.2)}.items():
        for repeat, time in enumerate(times):
            write_run(tmp_path / f"{loader}-{repeat}", loader, times=(9.0, time), config={"repeat": repeat})
    figure = figures(tmp_path)[TIMES]
    assert texts(figure)[1::2] == ["1.00 s, 1×", "1.10 s", "2.00 s, 2.00×"]


def test_a_bar_is_divided_into_phases_that_never_exceed_the_epoch(tmp_path: Path) -> None:
    """The medians of the phases may come from different runs."""
    for repeat, (wait, compute) in enumerate([(0.8, 2.0), (0.8, 2.0), (3.0, 0.8)]):
        epochs = [epoch(4.0, data_wait_s=wait, compute_s=compute) for _ in range(2)]
        write_run(tmp_path / "sum" / str(repeat), epochs=epochs, config={"repeat": repeat})
        write_run(tmp_path / "more" / str(repeat), epochs=[epoch(4.0, data_wait_s=3.0, compute_s=2.0)] * 2)
    for folder, widths in {"sum": [0.8, 2.0, 1.2], "more": [3.0, 1.0, 0.0]}.items():
        figure = figures(tmp_path / folder)[TIMES]
        bars, (legend,) = figure.axes[0].patches, figure.legends
        assert [bar.get_width() for bar in bars] == pytest.approx(widths)
        assert [text.get_text() for text in legend.texts] == [*PHASES]
        looks, explained = (
            [(bar.get_hatch(), bar.get_fill(), bar.get_alpha()) for bar in part]
            for part in (bars, legend.get_patches())
        )
        assert looks == explained
        assert len(set(looks)) == 3


def test_accuracies_have_a_dot_for_each_seed_and_curves_are_of_the_best_median_and_worst(tmp_path: Path) -> None:
    for depth, accuracies in enumerate([(90.0, 91.0, 92.0), (95.0, 80.0), (70.0,), (60.0,)]):
        for seed, accuracy in enumerate(accuracies):
            epochs = [epoch(1.0, loss, eval_acc=accuracy) for loss in (2.0, 1.0, 1.0 - accuracy / 100)]
            write_run(tmp_path / f"{depth}-{seed}", config={"model.depth": depth, "seed": seed}, epochs=epochs)
    write_run(tmp_path / "failed", status="failed", config={"model.depth": 9})
    shown = figures(tmp_path)
    assert [*shown] == [QUALITY, TIMES, LOSSES]
    labels = [figure.axes[0].get_xlabel() for figure in shown.values()]
    assert labels == ["after the last epoch", "one round; not compared", "epoch; the best seed of each"]
    assert texts(shown[QUALITY])[:6] == ["depth=0", "91.00%", "depth=1", "87.50%", "depth=2", "70.00%"]
    dots = [line.get_xdata() for line in shown[QUALITY].axes[0].lines if line.get_marker() == "o"]
    assert [sorted(values) for values in dots] == [[90.0, 91.0, 92.0], [80.0, 95.0], [70.0], [60.0]]
    (legend,) = shown[LOSSES].legends
    assert [text.get_text() for text in legend.texts] == ["best: depth=0", "middle: depth=2", "worst: depth=3"]
    assert [line.get_ydata()[2] for line in shown[LOSSES].axes[0].lines] == pytest.approx([0.08, 0.3, 0.4])


@pytest.mark.parametrize("rows", [1, MAX_ROWS + 1])
def test_texts_fit_do_not_overlap_and_are_readable_on_a_phone(rows: int, tmp_path: Path) -> None:
    """Also those of the longest panels: a PNG of all rows of a large sweep would be too high."""
    for size in range(rows):
        loader, time = ("disk", 12.0) if size % 3 else ("prefetch", 3.0)
        epochs = [epoch(time, loss=size, eval_acc=90.0 - size) for time in (9.0, time, time)]
        folder = tmp_path / f"{size}-{'long' * 30}"
        write_run(folder, loader, 5000 + size, config={"model.name": f"{size} long name $" * 9}, epochs=epochs)
    for title, figure in figures(tmp_path).items():
        with rc_context(fname=STYLE):
            figure.draw_without_rendering()
        (legend,), (axes,) = figure.legends, figure.axes
        assert len(axes.texts) == 2 * min(rows, MAX_ROWS) * ("loss" not in title)
        shown = [text for text in (*axes.texts, *legend.texts, axes.xaxis.label, figure._suptitle) if text.get_text()]
        boxes = [text.get_window_extent() for text in shown]
        bars = [bar.get_window_extent() for bar in axes.patches]
        assert not any(box.overlaps(other) for box, other in [*combinations(boxes, 2), *product(boxes, bars)])
        assert all(figure.bbox.contains(*corner) for box in boxes for corner in (box.min, box.max)), title
        assert min(text.get_fontsize() for text in shown) / 72 * 360 / figure.get_size_inches()[0] >= 9
