"""The documentation as a site: complete, without a dead link, and readable offline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass

import pytest

import vitmnist
from tests.config.test_validation import CONF, REGISTRIES
from tests.conftest import REPOSITORY
from vitmnist.config.schema import Config
from vitmnist.config.values import is_under

DOCS = REPOSITORY / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages of the site by the names of their folders; `--strict` fails with a dead link or anchor."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return {file.parent.name: file.read_text() for file in folder.rglob("index.html")}


@pytest.mark.slow
def test_the_site_loads_nothing_from_the_network(site: dict[str, str]) -> None:
    for page in site.values():
        assert not re.findall(r"<(?:img|link|script)\b[^>]*(?:src|href)=\"?(?:https?:)?//", page)


def keys(schema: type, group: str) -> list[str]:
    """The keys of a dataclass and of those in it, without the groups."""
    found = []
    for item in fields(schema):
        if is_dataclass(item.default_factory):
            found += keys(item.default_factory, f"{group}{item.name}.")
        elif not str(item.type).startswith("dict"):
            found.append(f"{group}{item.name}")
    return found


@pytest.mark.slow
def test_the_references_have_every_key_every_member_and_every_public_name(site: dict[str, str]) -> None:
    expected = keys(Config, "")
    for registry in REGISTRIES:
        group = registry.group.replace("/", ".")
        expected += [f"{group}.{item.name}" for name in registry.names() for item in fields(registry.options_of(name))]
    # `key=default`, and `group@key=default` for a group in an option.
    found = re.findall(r"<dt><code>(?:[\w/]+@)?([\w.]+)", site["configuration"])
    assert [key for key in expected if not any(is_under(name, [key]) for name in found)] == []
    members = {file.relative_to(CONF).with_suffix("").as_posix().replace("/", "-") for file in CONF.glob("*/**/*.yaml")}
    # `vitmnist.diagnose` is also the name of a module, whose page would show no signature.
    names = {"diagnosis.measure.diagnose" if name == "diagnose" else name for name in vitmnist.__all__}
    for page, anchors in (("configuration", members), ("api", {f"vitmnist.{name}" for name in names})):
        assert anchors <= set(re.findall(r'\bid="([^"]+)"', site[page]))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f": docs/{page.name}\n" not in navigation] == []
