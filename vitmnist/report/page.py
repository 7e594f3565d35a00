"""The report as a single HTML page, with the chart, the styles and the sorting of its tables within it."""

from __future__ import annotations

from importlib.resources import files

from markdown import markdown

CHART = "![Seconds per epoch](report.png)"  # in Markdown


def as_html(text: str, svg: str | None) -> str:
    """The Markdown report as a self-contained page.

    Args:
        svg: the chart, if the report has one.
    """
    body = markdown(text, extensions=["tables"], output_format="html")
    # Wide tables and the chart scroll within their own box, which the keyboard can reach.
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    if svg:
        chart = svg.replace("<svg", '<svg role="img" aria-label="Seconds per epoch"', 1)
        picture = markdown(CHART, output_format="html")
        body = body.replace(picture, f'<div class="scroll" tabindex="0">{chart}</div>')
    return files("vitmnist.report").joinpath("page.html").read_text(encoding="utf-8").replace("BODY", body)
