"""The documentation as a site: complete, without a dead link, and readable offline."""

import re

import pytest

import vitmnist
from tests.conftest import REPOSITORY
from tests.support.processes import run_python
from vitmnist.config import CONF

DOCS = REPOSITORY / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages of the site by the names of their folders; `--strict` fails with a dead link or anchor."""
    folder = tmp_path_factory.mktemp("site")
    command = ["-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    built = run_python(*command, folder=REPOSITORY, NO_MKDOCS_2_WARNING="1")
    assert built.returncode == 0, built.stderr
    return {file.parent.name: file.read_text() for file in folder.rglob("index.html")}


@pytest.mark.slow
def test_the_site_loads_nothing_from_the_network(site: dict[str, str]) -> None:
    for page in site.values():
        assert not re.findall(r"<(?:img|link|script)\b[^>]*(?:src|href)=\"?(?:https?:)?//", page)


@pytest.mark.slow
def test_the_references_have_every_member_and_every_public_name(site: dict[str, str]) -> None:
    """tests/config/test_validation.py checks that each key of the schema is in its YAML file, with a comment."""
    members = {file.relative_to(CONF).with_suffix("").as_posix().replace("/", "-") for file in CONF.glob("*/**/*.yaml")}
    # `vitmnist.diagnose` is also the name of a module, whose page would show no signature.
    names = {"diagnosis.measure.diagnose" if name == "diagnose" else name for name in vitmnist.__all__}
    for page, anchors in (("configuration", members), ("api", {f"vitmnist.{name}" for name in names})):
        assert anchors <= set(re.findall(r'\bid="([^"]+)"', site[page]))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f": docs/{page.name}\n" not in navigation] == []
