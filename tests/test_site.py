"""The documentation as a site: complete, without a dead link, and readable offline."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import vitmnist
from tests.config.test_validation import CONF, REGISTRIES
from tests.conftest import REPOSITORY
from vitmnist.config.schema import Config
from vitmnist.config.values import is_under

DOCS = REPOSITORY / "docs"


class Page(HTMLParser):
    """The anchors, the links, and the files that a page loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.text = file.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("img", "link", "script"):
            self.loaded += [values[name] for name in ("href", "src") if name in values]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages of the site by folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return {file.parent: Page(file) for file in folder.rglob("index.html")}


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_every_link_leads_somewhere(site: dict[Path, Page]) -> None:
    """A file that a page loads from the network counts as missing."""
    dead = []
    for folder, page in site.items():
        for link in [*page.links, *page.loaded]:
            url = urlsplit(link)
            if url.scheme == "https" and link in page.links:
                continue
            target = Path(os.path.normpath(folder / unquote(url.path)))
            there = site.get(target)
            is_found = not url.netloc and (target.is_file() or there)
            if not is_found or (there and url.fragment and unquote(url.fragment) not in there.anchors):
                dead.append((folder, link))
    assert dead == []


def keys(schema: type, place: str) -> list[str]:
    """The keys of a dataclass and of those in it, without the groups."""
    found = []
    for item in fields(schema):
        if is_dataclass(item.default_factory):
            found += keys(item.default_factory, f"{place}{item.name}.")
        elif not str(item.type).startswith("dict"):
            found.append(f"{place}{item.name}")
    return found


@pytest.mark.slow
def test_the_configuration_reference_has_every_key_and_every_member(site: dict[Path, Page]) -> None:
    (page,) = (page for folder, page in site.items() if folder.name == "configuration")
    expected = keys(Config, "")
    for registry in REGISTRIES:
        place = registry.group.replace("/", ".")
        expected += [f"{place}.{item.name}" for name in registry.names() for item in fields(registry.options_of(name))]
    # `key=default`, and `group@key=default` for a group in an option.
    found = re.findall(r"<dt><code>(?:[\w/]+@)?([\w.]+)", page.text)
    assert [key for key in expected if not any(is_under(name, [key]) for name in found)] == []
    members = {file.relative_to(CONF).with_suffix("").as_posix().replace("/", "-") for file in CONF.glob("*/**/*.yaml")}
    assert members <= page.anchors


@pytest.mark.slow
def test_the_api_reference_has_every_public_name(site: dict[Path, Page]) -> None:
    (page,) = (page for folder, page in site.items() if folder.name == "api")
    # `vitmnist.diagnose` is also the name of a module, whose page would show no signature.
    names = {"diagnosis.measure.diagnose" if name == "diagnose" else name for name in vitmnist.__all__}
    assert {f"vitmnist.{name}" for name in names} <= page.anchors


def test_the_charts_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "scripts"))
    charts = importlib.import_module("charts")
    drawn = {f"{name}.svg": charts.draw(chart) for name, chart in charts.CHARTS_OF_RESULTS.items()}
    assert drawn == {file.name: file.read_text() for file in (DOCS / "charts").iterdir()}, (
        "run python docs/scripts/charts.py"
    )


def test_every_page_is_in_the_navigation() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f": docs/{page.name}\n" not in navigation] == []
