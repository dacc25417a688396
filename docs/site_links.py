"""A hook of mkdocs: links from a page to a file of the repository outside `docs/` lead to the repository.

`DYNO_REPOSITORY_URL` names it, such as `https://host/owner/dyno/blob/main`. Without it such a link becomes
plain text, so that the site has no link that leads nowhere.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with its links to files outside `docs/` replaced."""
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))
    base = os.environ.get("DYNO_REPOSITORY_URL", "").rstrip("/")

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if target.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({base}/{target}{link[3] or ''})" if base else link[1]

    return _LINK.sub(replaced, markdown)
