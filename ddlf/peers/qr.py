"""QR codes of links in a terminal, for phones. Needs segno."""

from __future__ import annotations

import io

from ddlf.errors import ConfigError


def qr_code(link: str) -> str:
    """Return the QR code of a link as lines of half blocks, for a terminal.

    Raises:
        ConfigError: segno is not installed.
    """
    check_qr()
    import segno

    target = io.StringIO()
    segno.make(link, micro=False).terminal(out=target, compact=True)
    return target.getvalue().rstrip("\n")


def check_qr() -> None:
    """Refuse to print QR codes without segno, before a server starts.

    Raises:
        ConfigError: segno is not installed.
    """
    try:
        import segno  # noqa: F401
    except ImportError:
        raise ConfigError("--qr needs segno", hint="pip install 'ddlf[qr]', or leave out --qr") from None
