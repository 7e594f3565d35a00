"""The chart: which loader, how much faster, how certain."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from tests.support.records import compared, run
from vitmnist.report.plot import COLOURS, chart


def drawn(folder: Path) -> Axes:
    (axis,) = chart(compared(folder)).axes
    return axis


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
    assert axis.get_title(loc="left").startswith("Time per epoch\nSome CPU, here, mnist")
    assert axis.get_xlabel().endswith("(median of runs; whiskers: range; × the fastest)")
    assert axis.get_ylabel() == "batch_size, data/loader"
    assert axis.get_xscale() == "linear"


def test_a_loader_has_the_same_colour_in_every_chart(tmp_path: Path) -> None:
    run(tmp_path / "one" / "0", "ram", times=(9.0, 4.0))
    for number, loader in enumerate(("gpu_slice", "disk", "ram", "mine")):
        run(tmp_path / "four" / str(number), loader, times=(9.0, 4.0))
    assert to_hex(drawn(tmp_path / "one").patches[0].get_facecolor()).upper() == COLOURS["ram"]
    legend = drawn(tmp_path / "four").get_legend()
    colours = [to_hex(patch.get_facecolor()).upper() for patch in legend.get_patches()]
    assert dict(zip((text.get_text() for text in legend.texts), colours, strict=True)) == {
        **{name: COLOURS[name] for name in ("disk", "ram", "gpu_slice")},
        "another loader": "#999999",
        "waiting for data": "#FFFFFF",
    }


def test_the_waiting_time_is_hatched(tmp_path: Path) -> None:
    run(tmp_path / "0", times=(9.0, 4.0))
    epoch, waiting = drawn(tmp_path).patches
    assert (epoch.get_width(), waiting.get_width()) == (4.0, 0.8)
    assert waiting.get_hatch()
    assert not epoch.get_hatch()


def test_a_chart_without_times_says_so(tmp_path: Path) -> None:
    run(tmp_path / "0", status="failed", error="no", epochs=[])
    assert [text.get_text() for text in chart(compared(tmp_path)).texts] == ["no epoch has been measured yet"]
