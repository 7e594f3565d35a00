"""Properties of the processor."""

from pathlib import Path

import pytest

from vitmnist.runtime import cpu
from vitmnist.runtime.cpu import has_bf16_units


@pytest.mark.parametrize(
    ("information", "expected"),
    [
        ("vendor_id : AuthenticAMD\nflags : sse avx512_bf16", True),
        ("vendor_id : GenuineIntel\nflags : sse avx512_bf16", False),
        ("vendor_id : GenuineIntel\nflags : avx512_bf16 amx_bf16", True),
        ("vendor_id : AuthenticAMD\nflags : sse", False),
        ("Features : asimd bf16", True),
    ],
)
def test_bf16_is_chosen_where_it_was_measured_faster_or_has_units(
    information: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(information)
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    assert has_bf16_units() == expected
