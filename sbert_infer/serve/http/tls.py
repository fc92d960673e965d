"""The certificate for https, which can be replaced while the server runs."""

from __future__ import annotations

import ssl
from pathlib import Path


class Certificate:
    """A certificate and its key, and the context that new connections get."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.read()

    def read(self) -> None:
        """Read both files, again if they have changed. If one is bad, nothing changes."""
        for file in (self._cert, self._key):
            file.read_bytes()  # an error of the next line would not name the file
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._cert, self._key)
        except ssl.SSLError as error:
            files = f"{self._cert} and {self._key}"
            raise ValueError(f"{files} are no certificate with its key in PEM form: {error.reason or error}") from None
        self.context.load_cert_chain(self._cert, self._key)
