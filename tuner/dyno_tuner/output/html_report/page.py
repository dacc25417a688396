"""The HTML page: sections with tables and plots, and one copy of plotly.js, without network access.

The script of Plotly is packed (gzip, base64), which reduces it to a third, and unpacked by the browser. A
content security policy forbids the page to load anything.
"""

from __future__ import annotations

import base64
import gzip
import html
import importlib.util
import json
import logging
import os
from importlib import resources
from typing import TYPE_CHECKING, Any

from ...core.errors import JournalError, TuneError
from ...core.protocol import counted
from ...record.journal import unpacked_name
from ...record.validation import ODD
from .elements import Page
from .read import read
from .sections import fill

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("dyno.tuner")
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


_NO_PLOTLY = "the HTML report needs plotly, which is not installed: pip install 'gguf-dyno[report]'"


def check_plotly() -> None:
    """Raises TuneError if a page with figures could not be written here, before any work is done for it."""
    if importlib.util.find_spec("plotly") is None:
        raise TuneError(_NO_PLOTLY)


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise TuneError(_NO_PLOTLY) from error
    packed = gzip.compress(get_plotlyjs().encode(), 9, mtime=0)
    return base64.b64encode(packed).decode()


def _own(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that cannot end the script element around it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def render(journal: Path) -> str:
    """The page of a journal. Raises JournalError if it cannot be read, and TuneError without plotly."""
    page = Page()
    run = read(journal)
    try:
        fill(page, run)
    except ODD as error:  # each record is valid, but together they are inconsistent
        raise JournalError(
            f"journal {journal}: its records do not fit together ({type(error).__name__}: {error!s:.100})"
        ) from error
    if run.odd:
        _log.warning("%s; the report leaves out %s", run.odd[0], counted(len(run.odd), "record"))
    return document(page)


def document(page: Page) -> str:
    """The whole page as HTML. Raises TuneError if it has figures and plotly is missing."""
    library = _plotly() if page.figures else ""
    scripts = (
        f'<script type="application/json" id="figures">{_json(page.figures)}</script>\n'
        f'<script type="text/plain" id="plotly">{library}</script>\n<script>{_own("page.js")}</script>'
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(page.title)}</title>\n<style>\n{_own('page.css')}</style>\n</head>\n<body>\n"
        f"<main>\n{''.join(page.parts)}</main>\n{scripts if page.figures else ''}\n</body>\n</html>\n"
    )


def write_report(journal: Path, out: Path | None = None) -> Path:
    """Write the page of `journal`, and return its path: `out`, or a file next to the journal with `.html`.

    Raises JournalError or TuneError, with what to do.
    """
    path = out if out is not None else journal.with_name(unpacked_name(journal)).with_suffix(".html")
    if path.resolve() == journal.resolve():
        raise TuneError(f"--out {path}: this is the journal itself; give another file")
    text = render(journal)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TuneError(f"report {path}: cannot be written: {error.strerror}") from error
    return path
