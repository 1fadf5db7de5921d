"""Public files that scripts learn from: downloaded, or a copy, and the same bytes either way."""

import hashlib
from pathlib import Path

from fastp3o.errors import UserError


def pinned_file(urls: tuple[str, ...], sha256: str, copy: Path | None, flag: str) -> bytes:
    """The content of a file at the first of `urls` that answers, or of a copy.

    Args:
        urls: the same file at several places.
        sha256: of its content, in hexadecimal.
        copy: a file on this machine; None downloads.
        flag: the option that takes a copy, for messages.

    Raises UserError if no URL answers, or if the content is another one.
    """
    content = downloaded(urls, flag) if copy is None else copy.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise UserError(
            f"{copy or 'the download'} is another file than expected: sha256 {digest}, not {sha256}"
        )
    return content


def downloaded(urls: tuple[str, ...], flag: str) -> bytes:
    """Raises UserError if no URL answers."""
    import httpx

    failures = []
    for url in urls:
        try:
            return httpx.get(url, follow_redirects=True, timeout=60).raise_for_status().content
        except httpx.HTTPError as error:
            # A status's second line is where to read about statuses.
            reason = str(error).partition("\n")[0] or type(error).__name__
            failures.append(f"{url} ({reason})")
    raise UserError(f"cannot download the data: {'; '.join(failures)}. {flag} takes a copy")
