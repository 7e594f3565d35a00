"""The documentation: valid code, no dead link, and a complete site that is readable offline."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import vitmnist
from tests.support.pages import PAGES, blocks
from tests.support.processes import REPOSITORY, run_python
from vitmnist.config import CONF

DOCS = REPOSITORY / "docs"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_has_every_member_and_every_public_name_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    """`--strict` fails with a dead link or anchor.

    tests/config/test_schema.py checks that each key of the schema is in its YAML file, with a comment.
    """
    command = ["-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    built = run_python(*command, folder=REPOSITORY, NO_MKDOCS_2_WARNING="1")
    assert built.returncode == 0, built.stderr
    site = {file.parent.name: file.read_text() for file in tmp_path.rglob("index.html")}
    for page in site.values():
        assert not re.findall(r"<(?:img|link|script)\b[^>]*(?:src|href)=\"?(?:https?:)?//", page)
    members = {file.relative_to(CONF).with_suffix("").as_posix().replace("/", "-") for file in CONF.glob("*/**/*.yaml")}
    # `vitmnist.diagnose` is also the name of a module, whose page would show no signature.
    names = {"diagnosis.measure.diagnose" if name == "diagnose" else name for name in vitmnist.__all__}
    for page, anchors in (("configuration", members), ("api", {f"vitmnist.{name}" for name in names})):
        assert anchors <= set(re.findall(r'\bid="([^"]+)"', site[page]))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f": docs/{page.name}\n" not in navigation] == []


def headings(file: Path) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_code_blocks_are_valid_and_links_lead_to_a_file_and_a_heading() -> None:
    for page in PAGES:
        for block in blocks("python", page):
            ast.parse(block)
        for block in blocks("yaml", page):
            yaml.safe_load(block)
        subprocess.run(["bash", "-n", "-c", "\n".join(blocks("bash", page))], check=True)
        for text, target in re.findall(r"\[([^\]]*)\]\(((?!https:)[^)]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), target
            assert not anchor or anchor in headings(file), target
            if file.suffix == ".py" and (symbol := re.fullmatch(r"`(\w+)`", text)):
                defined = rf"^\s*(def|class) {symbol[1]}\b|^{symbol[1]}\b.* = "
                assert re.search(defined, file.read_text(), re.MULTILINE), f"{symbol[1]} is not in {target}"
