"""The chart: which loader, how much faster, how sure."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from tests.support.records import compared, run
from vitmnist.report.plot import COLOURS, chart


def drawn(folder: Path) -> Axes:
    (axis,) = chart(compared(folder)).axes
    return axis


def test_bars_are_sorted_within_a_batch_size_and_say_how_sure_they_are(tmp_path: Path) -> None:
    times = [("disk", 300, 9.0), ("ram", 300, 3.0), ("disk", 100, 4.0), ("ram", 100, 8.0)]
    for number, (loader, size, time) in enumerate(times):
        for repeat in range(6):
            run(tmp_path / f"{number}-{repeat}", loader, size, (9.0, time), config={"repeat": repeat})
    run(tmp_path / "broken", "cache", 100, (9.0, 1.0), status="interrupted", error="SIGTERM")
    axis = drawn(tmp_path)
    assert [label.get_text() for label in axis.get_yticklabels()] == ["disk", "ram", "cache", "ram", "disk"]
    assert [text.get_text().strip() for text in axis.texts] == [
        "batch size 100",
        "4.00 s (n=6)",
        "8.00 s (n=6), ×2.00, not enough repeats",
        "1.00 s (n=1), not ranked: interrupted",
        "batch size 300",
        "3.00 s (n=6)",
        "9.00 s (n=6), ×3.00, not enough repeats",
    ]
    assert axis.get_title(loc="left").startswith("Time per epoch\nSome CPU, here, mnist")
    assert axis.get_xlabel().endswith("(median of runs; whiskers: range; × the fastest of its batch size)")
    assert axis.get_ylabel() == "data/loader"
    assert axis.get_xscale() == "linear"


def test_a_loader_has_one_colour_in_every_chart(tmp_path: Path) -> None:
    run(tmp_path / "one" / "0", "ram", times=(9.0, 4.0))
    for number, loader in enumerate(("gpu_slice", "disk", "ram")):
        run(tmp_path / "three" / str(number), loader, times=(9.0, 4.0))
    assert to_hex(drawn(tmp_path / "one").patches[0].get_facecolor()).upper() == COLOURS["ram"]
    legend = drawn(tmp_path / "three").get_legend()
    shown = {
        text.get_text(): to_hex(patch.get_facecolor()).upper()
        for text, patch in zip(legend.texts, legend.get_patches(), strict=True)
    }
    assert shown == {name: COLOURS[name] for name in ("disk", "ram", "gpu_slice")} | {"waiting for data": "#FFFFFF"}


def test_the_share_of_waiting_is_hatched(tmp_path: Path) -> None:
    run(tmp_path / "0", times=(9.0, 4.0))
    whole, waiting = drawn(tmp_path).patches
    assert (whole.get_width(), waiting.get_width()) == (4.0, 0.8)
    assert waiting.get_hatch()
    assert not whole.get_hatch()


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    run(tmp_path / "0", status="failed", error="no", epochs=[])
    assert [text.get_text() for text in chart(compared(tmp_path)).texts] == ["no epoch has been measured yet"]
