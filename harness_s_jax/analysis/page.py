"""A report in Markdown, and as one HTML file: no scripts, no network, fit for phones and paper."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence

from markdown_it import MarkdownIt

from harness_s_jax.analysis.tables import markdown


def code(value: object) -> str:
    """A value that others chose, as Markdown that holds no markup of theirs; a number as it is."""
    if isinstance(value, int):
        return str(value)
    plain = re.sub(r"\s+", " ", str(value))
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    return f"{fence} {plain} {fence}" if len(fence) > 1 else f"`{plain}`"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table whose cells may hold a "|"."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    return markdown(cells[0], cells[1:])


_STYLE = """
body { margin: 0 auto; max-width: 60rem; padding: 1rem; color: #1a1a1a; background: #fff;
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; } h3 { font-size: 1.05rem; }
h1, h2, h3 { line-height: 1.25; break-after: avoid; }
.wide { overflow-x: auto; margin: 0.8rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.7rem; text-align: left; white-space: nowrap;
  border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
tr { break-inside: avoid; }
.number { text-align: right; }
td span { color: #666; }
code { font-size: 0.9em; overflow-wrap: anywhere; }
img { display: block; width: 100%; min-width: 40rem; break-inside: avoid; }
section { break-inside: avoid; }
@media (max-width: 40rem) { th, td { padding: 0.25rem 0.4rem; } th { white-space: normal; }
  td span { display: block; } }
@media print { body { max-width: none; padding: 0; }
  .wide { overflow: visible; break-inside: avoid; } img { min-width: 0; }
  table { font-size: 8pt; } th, td { padding: 1pt 4pt; } }
"""


def page(text: str, svgs: Mapping[str, str]) -> str:
    """The Markdown as one HTML file that needs nothing else; raw HTML in it stays text."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(r"<h3>.*?(?=<h[23]>|\Z)", r"<section>\g<0></section>\n", body, flags=re.DOTALL)
    for name, svg in svgs.items():
        data = base64.b64encode(svg.encode()).decode()
        body = body.replace(f'src="{name}"', f'src="data:image/svg+xml;base64,{data}"')
    body = body.replace("<table>", '<div class="wide"><table>')
    body = body.replace("</table>", "</table></div>")
    body = body.replace("<p><img", '<p class="wide"><img')
    body = re.sub(r"<td>([\d,.]+|-)</td>", r'<td class="number">\1</td>', body)
    body = re.sub(r"(<td>[^<\[]+)(\[[^<\]]+\])</td>", r"\1<span>\2</span></td>", body)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Harness-S: what training changed</title>
<style>{_STYLE}</style>
</head>
<body>
{body}</body>
</html>
"""
