"""The status page: one document of HTML, style and script that asks for nothing but data.

The parts lie beside this file and are put together once. They hold nothing of the server: all that
is shown is fetched from ``/startup``, ``/metrics`` and ``/version``, with the key where one is
needed, so the document itself is the same for everybody.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import attrs

FOLDER = Path(__file__).parent
STYLES = ("base.css", "status.css", "chat.css")
SCRIPTS = ("dom.js", "series.js", "reading.js", "link.js", "status.js", "chat.js", "main.js")


@attrs.frozen
class Document:
    """A whole document with the headers that go with it."""

    body: bytes
    etag: str  # without quotes
    headers: dict[str, str]


def make_document(*, locked: bool = False) -> Document:
    """Read the parts and put them together.

    Args:
        locked: the variant for those without a key: it begins with the form that asks for one.
    """
    style, script = _joined(STYLES), _joined(SCRIPTS)
    html = (FOLDER / "page.html").read_text(encoding="utf-8")
    html = html.replace("{style}", style).replace("{script}", script)
    html = html.replace("{locked}", " data-locked" if locked else "")
    body = html.encode()
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        # Kept but asked for again each time: a page of another version would misread the data.
        "Cache-Control": "no-store" if locked else "private, no-cache",
        "Content-Security-Policy": _policy(style, script),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
    return Document(body, hashlib.sha256(body).hexdigest()[:32], headers)


def _joined(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in names)


def _policy(style: str, script: str) -> str:
    """Only this style and this script, data from this server, the icon; no markup from scripts."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
