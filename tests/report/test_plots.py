"""The chart: which loader, how much faster, how certain."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from tests.support.records import compared, epoch, run
from vitmnist.report.plots import COLOURS, PHASES, chart


def drawn(folder: Path) -> Axes:
    return chart(compared(folder)).axes[0]


def test_bars_are_sorted_within_a_batch_size_and_say_how_certain_they_are(tmp_path: Path) -> None:
    times = [("disk", 300, 9.0), ("ram", 300, 3.0), ("disk", 100, 4.0), ("ram", 100, 8.0)]
    for number, (loader, size, time) in enumerate(times):
        for repeat in range(8):
            run(tmp_path / f"{number}-{repeat}", loader, size, (9.0, time), config={"repeat": repeat})
    run(tmp_path / "broken", "cache", 100, (9.0, 1.0), status="interrupted", error="SIGTERM")
    axis = drawn(tmp_path)
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["100, disk", "100, ram", "100, cache", "300, ram", "300, disk"]
    assert [text.get_text().strip() for text in axis.texts] == [
        "4.00 s (n=8), × 1.33 (1.33–1.33)",
        "8.00 s (n=8), × 2.67 (2.67–2.67)",
        "1.00 s (n=1), not ranked: interrupted: SIGTERM",
        "3.00 s (n=8)",
        "9.00 s (n=8), × 3.00 (3.00–3.00)",
    ]
    title = "Time per epoch by batch_size, data/loader\nSome CPU, here, mnist"
    assert axis.get_title(loc="left").startswith(title)
    assert axis.get_xlabel().endswith("(median of runs; whiskers: range; × the fastest)")
    assert axis.get_xscale() == "linear"


def test_loaders_take_colours_by_order_of_appearance_and_the_legend_names_them(tmp_path: Path) -> None:
    for number, loader in enumerate(("gpu_slice", "mine", "ram")):
        run(tmp_path / str(number), loader, times=(9.0, 4.0 + number))
    figure = chart(compared(tmp_path))
    (legend,) = figure.legends
    colours = [to_hex(patch.get_facecolor()).upper() for patch in legend.get_patches()[:3]]
    assert colours == list(COLOURS[:3])
    assert [text.get_text() for text in legend.texts[:3]] == ["gpu_slice", "mine", "ram"]
    assert [to_hex(bar.get_facecolor()).upper() for bar in figure.axes[0].patches[1::3]] == colours


def test_a_bar_is_divided_into_waiting_computing_and_other_as_the_legend_says(tmp_path: Path) -> None:
    run(tmp_path / "0", times=(9.0, 4.0))
    figure = chart(compared(tmp_path))
    bars = figure.axes[0].patches
    assert [bar.get_x() for bar in bars] == pytest.approx([0.0, 0.8, 2.8])
    assert [bar.get_width() for bar in bars] == pytest.approx([0.8, 2.0, 1.2])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts[1:]] == list(PHASES)
    looks = [
        [(bar.get_hatch(), bar.get_fill(), bar.get_alpha()) for bar in part] for part in (bars, legend.get_patches())
    ]
    assert looks[0] == looks[1][1:]
    assert len(set(looks[0])) == 3


def test_phases_never_exceed_the_epoch(tmp_path: Path) -> None:
    """The medians of the parts come from different runs."""
    for repeat, (wait, compute) in enumerate([(0.1, 3.0), (3.0, 0.1), (3.0, 0.8), (0.1, 3.0), (2.0, 2.0)]):
        epochs = [epoch(4.0, train_s=4.0, eval_s=0.0, data_wait_s=wait, compute_s=compute) for _ in range(2)]
        run(tmp_path / str(repeat), epochs=epochs, config={"repeat": repeat})
    widths = [bar.get_width() for bar in drawn(tmp_path).patches]
    assert min(widths) >= 0
    assert sum(widths) == pytest.approx(4.0)


def test_long_names_leave_room_for_the_bars(tmp_path: Path) -> None:
    run(tmp_path / "0", config={"model.name": "m" * 200})
    run(tmp_path / "1", status="failed", error="m" * 200)
    figure = chart(compared(tmp_path))
    figure.canvas.draw()
    frame = figure.axes[0].get_position()
    assert frame.width > 0.1
    assert 0 < frame.x0 < frame.x1 < 1
