"""Great Expectations' Data Docs as pages that open offline: nothing is loaded, and nothing runs.

Its pages take style sheets, scripts, icons and images from five other hosts, and its list of pages is drawn by a script. What they say
stands in the pages themselves, so that without all this they only need a style, a mark for each result and a list of links.
"""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path
from urllib.parse import quote

from rlhf_core.config import reordering_shown

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem; color: #222; background: #fff; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { border: 1px solid #ccc; padding: .3rem .6rem; vertical-align: top; text-align: left; }
.fa-check-circle::before { content: "\\2714"; color: #17803d; } .fa-times::before { content: "\\2718"; color: #c0262d; }
.fa-exclamation-triangle::before { content: "\\26A0"; }
.modal, .card.mb-3, .btn, .btn-group, .cta-footer, footer, form, input { display: none; }
.sticky, .ge-breadcrumbs { position: static; } .nav, .ge-breadcrumbs { list-style: none; padding-left: 0; }
"""
_HEAD = f'<head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{STYLE}</style>'
_SCRIPT = re.compile(
    r"<script\b.*?</script\s*>|<link\b[^>]*>|<style\b.*?</style\s*>|<img\b[^>]*>|<iframe\b.*?</iframe\s*>", re.DOTALL | re.IGNORECASE
)
_OUTSIDE = re.compile(r"<a\b[^>]*href=[\"']https?:[^>]*>(.*?)</a\s*>", re.DOTALL | re.IGNORECASE)
_INDEX = "index.html"


def make_offline(folder: Path) -> None:
    """Rewrite every page of the Data Docs in a folder, with an index of links; what the pages no longer use goes."""
    pages = sorted(path for path in folder.rglob("*.html") if path != folder / _INDEX)
    for path in pages:
        path.write_text(offline(path.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / _INDEX).write_text(index([path.relative_to(folder) for path in pages]), encoding="utf-8")
    shutil.rmtree(folder / "static", ignore_errors=True)


def offline(page: str) -> str:
    """A page without scripts, images, styles and links to elsewhere, with a style and a policy that loads nothing."""
    page = _OUTSIDE.sub(r"\1", _SCRIPT.sub("", page))
    return reordering_shown(re.sub(r"<head\b[^>]*>", lambda _: _HEAD, page, count=1))


def index(pages: list[Path]) -> str:
    """Results of validation first, then what was expected."""
    parts = []
    for kind, title in (("validations", "Results"), ("expectations", "Expectations")):
        links = [
            f'<li><a href="{quote(page.as_posix())}">{html.escape(page.parts[1].removesuffix(".html"))}</a></li>'
            for page in pages
            if page.parts[0] == kind
        ]
        parts.append(f"<h2>{title}</h2>\n<ul>\n" + "\n".join(links) + "\n</ul>")
    body = "\n".join(parts)
    return f"<!DOCTYPE html>\n<html>\n{_HEAD}<title>Data Docs</title></head>\n<body>\n<h1>Data Docs</h1>\n{body}\n</body>\n</html>\n"
