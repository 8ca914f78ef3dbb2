"""Who asks: API keys, and what each key has of its own."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from lookahead.algorithm.sources import SharedMemory
from lookahead.serve.errors import ApiError

VARIABLE = "LOOKAHEAD_API_KEYS"
TRACE = "trace"
"""The word after a key that gives it the right to see its requests' token trees."""


@dataclass(eq=False)
class Owner:
    """One key's part of the server. Requests share K/V and recycled successors only with those of the same owner.

    `name` is safe to log. `file` names the owner's memory on disk. `may_trace`: its requests may ask for token trees.
    The guesses in a tree come from the owner's memory, so a tree may show what others of the same memory have asked.
    """

    name: str
    salt: str
    memory: SharedMemory
    file: str
    may_trace: bool = False


class Keys(NamedTuple):
    """The keys that may ask, and which of them may trace."""

    all: tuple[str, ...] = ()
    tracing: frozenset[str] = frozenset()


class KeyRing:
    """The keys that may ask. Without any, everybody may, and all are one owner.

    Requests of the `tracing` keys may ask for token trees. Without keys, `open_trace` says whether everybody may.

    Only hashes of the keys are kept. A key is compared with all of them, each in constant time, so that the time of the
    answer tells nothing about them.
    """

    def __init__(
        self,
        keys: Sequence[str],
        memory: SharedMemory,
        share: bool = False,
        tracing: Collection[str] = (),
        open_trace: bool = False,
    ) -> None:
        self._hashes = [_hash(key) for key in keys]
        everybody = Owner("everybody", "", memory, "shared")
        traced = replace(everybody, may_trace=True)
        rights = [key in tracing for key in keys]
        if not keys:
            self.owners = [traced if open_trace else everybody]
        elif share:
            self.owners = [traced if right else everybody for right in rights]
        else:
            self.owners = [
                Owner(f"key-{number}", secrets.token_hex(16), SharedMemory(memory.drafter), hashed.hex()[:24], right)
                for number, (hashed, right) in enumerate(zip(self._hashes, rights, strict=True), start=1)
            ]

    def owner(self, authorization: str | None) -> Owner:
        """The owner of an Authorization header's key. Raises a 401 if there is none."""
        if not self._hashes:
            return self.owners[0]
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "no API key; send the header 'Authorization: Bearer YOUR_KEY'", code="no_api_key")
        given = _hash(key.strip())
        found = None
        for owner, known in zip(self.owners, self._hashes, strict=True):
            if hmac.compare_digest(given, known):
                found = owner
        if found is None:
            raise ApiError(401, "this API key is not known here", code="invalid_api_key")
        return found


def read_keys(path: Path | None, env: Mapping[str, str]) -> Keys:
    """The keys of a file, one per line with # for comments, or those of the variable, with commas between them.

    The word `trace` may stand after a key.
    """
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {str(path)!r} cannot be read: {error}") from error
        where = f"--api-key-file {str(path)!r}"
    elif VARIABLE in env:
        lines, where = env[VARIABLE].split(","), VARIABLE
    else:
        return Keys()
    entries = [line.split() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not entries:
        raise ValueError(f"{where} has no key; write one per line, or leave it out")
    for number, (key, *rights) in enumerate(entries, start=1):
        if len(key) < 8 or not key.isascii() or rights not in ([], [TRACE]):
            raise ValueError(
                f"key {number} of {where} must have at least 8 ASCII characters and no spaces; only the word "
                f"{TRACE!r} may follow it"
            )
    keys = tuple(entry[0] for entry in entries)
    if len(set(keys)) < len(keys):
        raise ValueError(f"{where} has a key twice; each may stand there once")
    return Keys(keys, frozenset(entry[0] for entry in entries if len(entry) > 1))


def _hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), person=b"lookahead-key").digest()
