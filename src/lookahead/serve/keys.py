"""API keys: authentication, rights, and the caches that belong to each key.

A key is written as `KEY [name=NAME] [rights=RIGHT+RIGHT]`, one per line of a file, or with commas between them in the
environment. Every key may generate text. The rights grant more than that:

    metrics    `/metrics`, which counts the requests of all keys
    trace      the token trees of its own requests' steps
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lookahead.algorithm.sources import SharedMemory
from lookahead.serve.errors import ApiError

VARIABLE = "LOOKAHEAD_API_KEYS"
RIGHTS = frozenset({"metrics", "trace"})
CHALLENGE = 'Bearer realm="lookahead"'
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Key:
    """One line of a key file. `rights` is None if the line has none."""

    secret: str = field(repr=False)
    name: str | None = None
    rights: frozenset[str] | None = None

    @classmethod
    def parse(cls, line: str) -> Key:
        """Raises ValueError without quoting the line, which is a secret."""
        secret, *words = line.split()
        if len(secret) < 8 or not secret.isascii():
            raise ValueError("must have at least 8 ASCII characters and no spaces")
        given: dict[str, str] = {}
        for word in words:
            what, equals, value = word.partition("=")
            if not equals or what not in ("name", "rights") or what in given:
                raise ValueError("must have no spaces, and only name=NAME and rights=metrics+trace may follow it")
            given[what] = value
        name = given.get("name")
        if name is not None and not NAME.fullmatch(name):
            raise ValueError("has a name that is not 1 to 64 letters, digits, dots, dashes and underscores")
        rights = frozenset(given["rights"].split("+")) if "rights" in given else None
        if rights is not None and not rights <= RIGHTS:
            raise ValueError(f"has unknown rights; there are {', '.join(sorted(RIGHTS))}, with + between them")
        return cls(secret, name, rights)


@dataclass(eq=False)
class Owner:
    """The caches and rights of one key. Requests share K/V and recycled successors only within an owner.

    `name` is safe to log. `file` names the owner's memory file. `rights` are those of its key.
    """

    name: str
    salt: str
    memory: SharedMemory
    file: str
    rights: frozenset[str] = frozenset()

    def require_right(self, right: str, what: str, param: str | None = None) -> None:
        """Raise a 403 unless the owner has the right that `what` needs. `param` is the request field in question."""
        if right not in self.rights:
            raise ApiError(
                403,
                f"{what} needs a key with the right {right!r}; write rights={right} after the key in the server's key "
                "file",
                param=param,
                code="no_right",
            )


class KeyRing:
    """The accepted keys, each as a line of a key file. Without keys every client is accepted as one common owner.

    A single key has all rights unless its line lists some: there are no other owners to protect. Without keys all
    clients have all rights, except that `trace` is refused on a `public` server, because the draft tokens in a tree
    come from other clients' prompts. With `share` all owners use the same memory and salt.

    Only hashes of the keys are stored. A key is compared with all of them in constant time, so that response times leak
    nothing.
    """

    def __init__(self, lines: Sequence[str], memory: SharedMemory, share: bool = False, public: bool = False) -> None:
        keys = [Key.parse(line) for line in lines]
        unnamed = RIGHTS if len(keys) == 1 else frozenset[str]()
        self._hashes = [_hash(key.secret) for key in keys]
        everybody = Owner("everybody", "", memory, "shared", RIGHTS - {"trace"} if public else RIGHTS)
        self.owners = [] if keys else [everybody]
        for number, (key, hashed) in enumerate(zip(keys, self._hashes, strict=True), start=1):
            owner = Owner(key.name or f"key-{number}", "", memory, "shared", unnamed)
            if key.rights is not None:
                owner.rights = key.rights
            if not share:
                owner.salt, owner.file = secrets.token_hex(16), hashed.hex()[:24]
                owner.memory = memory.new()
            self.owners.append(owner)

    def owner(self, authorization: str | None) -> Owner:
        """The owner of the key in an Authorization header. Raises a 401 if the key is missing or unknown."""
        if not self._hashes:
            return self.owners[0]
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(
                401,
                "no API key; send the header 'Authorization: Bearer YOUR_KEY'",
                code="no_api_key",
                headers={"WWW-Authenticate": CHALLENGE},
            )
        given = _hash(key.strip())
        found = None
        for owner, known in zip(self.owners, self._hashes, strict=True):
            if hmac.compare_digest(given, known):
                found = owner
        if found is None:
            raise ApiError(
                401,
                "this API key is not known here",
                code="invalid_api_key",
                headers={"WWW-Authenticate": f'{CHALLENGE}, error="invalid_token"'},
            )
        return found


def read_keys(path: Path | None, env: Mapping[str, str]) -> tuple[str, ...]:
    """The key lines of a file (# starts a comment) or of the environment variable (separated by commas)."""
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {str(path)!r} cannot be read: {error}") from error
        where = f"--api-key-file {str(path)!r}"
    elif VARIABLE in env:
        lines, where = env[VARIABLE].split(","), VARIABLE
    else:
        return ()
    lines = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not lines:
        raise ValueError(f"{where} has no key; write one per line, or leave it out")
    keys = []
    for number, line in enumerate(lines, start=1):
        try:
            keys.append(Key.parse(line))
        except ValueError as error:
            raise ValueError(f"key {number} of {where} {error}") from None
    if len({key.secret for key in keys}) < len(keys):
        raise ValueError(f"{where} has a duplicate key; remove one")
    names = [key.name for key in keys if key.name is not None]
    if len(set(names)) < len(names):
        raise ValueError(f"{where} has a duplicate name; give each key its own")
    return tuple(lines)


def _hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), person=b"lookahead-key").digest()
