"""Puts files of the repository on the site, each at its path in the repository, so that relative links need no change.

MkDocs reads `docs/static` only. These hooks add the README, the changelog and the API reference, then every file and
folder that a page links to. Markdown becomes a page, a picture is copied, and anything else is shown as text.
"""

import re
from functools import cached_property
from pathlib import Path
from posixpath import basename, dirname, join, normpath
from urllib.parse import urlsplit

from configuration import configuration_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
START = ("README.md", "CHANGELOG.md", "docs/api.md")
PICTURES = (".png", ".svg")
LISTED = (".csv", ".md", ".py", ".yaml")


class RepositoryFile(File):
    """A file or folder of the repository; everything but a picture is a page."""

    def is_documentation_page(self) -> bool:
        return not self.src_uri.endswith(PICTURES)

    @cached_property
    def name(self) -> str:  # type: ignore[override]
        """The last part of the page's address: `loaders`, but `run.py`, since a folder or page `run` may exist too."""
        return self._get_stem() if self.src_uri.endswith(".md") else basename(self.src_uri)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the configuration reference, and what can be reached by links from the first pages."""
    files.append(File.generated(config, "configuration.md", content=configuration_page()))
    queue = list(START)
    for path in queue:  # grows
        files.append(RepositoryFile(path, str(ROOT), config.site_dir, config.use_directory_urls))
        queue += sorted(set(_links(path)) - set(queue))
    return files


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """The Markdown of a page; None lets MkDocs read it."""
    return _markdown(page.file.src_uri) if isinstance(page.file, RepositoryFile) else None


def _markdown(path: str) -> str:
    file = ROOT / path
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    text = _listing(file) if file.is_dir() else f"~~~~~{file.suffix[1:]}\n{file.read_text(encoding='utf-8')}\n~~~~~"
    return f"---\nsearch: {{exclude: true}}\n---\n# `{path}`\n\n{text}\n"


def _listing(folder: Path) -> str:
    """A link to each file and folder, with what the file says of itself."""
    lines = []
    for file in sorted(folder.iterdir()):
        if file.suffix in LISTED:
            lines.append(f"- [`{file.name}`]({folder.name}/{file.name}) {_opening(file)}")
        elif any(inner.suffix in LISTED for inner in file.rglob("*")):  # not in __pycache__
            lines.append(f"- [`{file.name}/`]({folder.name}/{file.name})")
    return "\n".join(lines)


def _opening(file: Path) -> str:
    """The first line of a file's docstring or opening comment."""
    if file.suffix == ".csv":
        return ""
    lines = (line.strip('"# ') for line in file.read_text(encoding="utf-8").splitlines() if "@package" not in line)
    return next((line for line in lines if line), "")


def _links(path: str) -> list[str]:
    """The paths in the repository that a page links to."""
    if not (path.endswith(".md") or (ROOT / path).is_dir()):
        return []
    targets = map(urlsplit, re.findall(r"\]\(([^)\s]+)\)", _markdown(path)))
    found = [normpath(join(dirname(path), target.path)) for target in targets if target.path and not target.scheme]
    return [link for link in found if (ROOT / link).exists()]
