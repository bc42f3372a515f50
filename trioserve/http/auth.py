"""API keys: from the configuration, and from a file that is read anew when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Sequence
from typing import ClassVar

from trioserve.config.access import KEY
from trioserve.errors import ConfigError, RequestError
from trioserve.http.reloading import Reloaded

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024 * 1024


class Unauthorized(RequestError):
    """No key, or none that is known here. Raised by nobody: the guard answers with it."""

    status: ClassVar[int] = 401
    default_code: ClassVar[str] = "invalid_api_key"

    @property
    def challenge(self) -> str:
        """The value of the WWW-Authenticate header."""
        tried = self.code == self.default_code
        return 'Bearer realm="trioserve"' + (', error="invalid_token"' if tried else "")


class ApiKeys:
    """The keys of which a client must present one. Kept as digests only.

    Args:
        keys: from the configuration.
        path: a file with further keys, or None.

    Raises:
        ConfigError: the file cannot be used; names it and the remedy, never what it holds.
    """

    def __init__(self, keys: Sequence[str], path: str | None) -> None:
        self._fixed = tuple(_digest(key.encode()) for key in keys)
        self._path = path
        self._file = Reloaded("API keys", [path] if path is not None else [], self._read)

    @property
    def asked_for(self) -> bool:
        """Whether a client needs a key at all."""
        return bool(self._fixed) or self._path is not None

    def refuse(
        self, authorization: Sequence[bytes], x_api_key: Sequence[bytes]
    ) -> RequestError | None:
        """What is wrong with the values of the two headers a key may come in, or None."""
        if len(authorization) > 1 or len(x_api_key) > 1:
            return Unauthorized("several API keys in headers of one name; send one")
        presented = [value.strip(b" \t") for value in x_api_key]
        for value in authorization:
            scheme, _, rest = value.partition(b" ")
            if scheme.lower() == b"bearer":
                presented.append(rest.strip(b" \t"))
        if not presented:
            return Unauthorized(
                "no API key; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="missing_api_key",
            )
        # All are compared, and each in whole: how long it takes tells nothing of any key.
        known = (*self._fixed, *self._file.get())
        found = False
        for value in presented:
            digest = _digest(value)
            for other in known:
                found |= hmac.compare_digest(digest, other)
        return None if found else Unauthorized("the API key is not known here")

    def _read(self) -> tuple[bytes, ...]:
        return _read_keys(self._path) if self._path is not None else ()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read_keys(path: str) -> tuple[bytes, ...]:
    where = f"http.api_keys_file {path}"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{where}: is not a regular file")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{where}: is over 1 MiB, so no list of keys")
    keys = []
    for number, line in enumerate(content.decode("utf-8-sig", "replace").splitlines(), 1):
        words = line.partition("#")[0].split() if line.lstrip().startswith("#") else line.split()
        if len(words) > 1 and words[1].startswith("#"):
            words = words[:1]
        if len(words) > 1 or not all(map(KEY.fullmatch, words)):
            raise ConfigError(
                f"{where}: line {number} is no key; one a line, printable ASCII without spaces"
            )
        keys += words
    if not keys:
        raise ConfigError(f"{where}: holds no key; write one a line")
    if mode & stat.S_IROTH:
        log.warning("%s can be read by every user of this machine; chmod o-r it", where)
    return tuple(_digest(key.encode()) for key in keys)
