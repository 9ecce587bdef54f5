"""The file of API keys: hashes of keys, whom they belong to, and what these may do. Read anew when it changes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from tokenmill.compat import did_you_mean
from tokenmill.errors import ConfigError
from tokenmill.processor import PRIORITIES
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.tenants import Tenant, TenantLimits

log = logging.getLogger("tokenmill.serve")

PREFIX = "tm-"
_LIMITS = {field.name for field in fields(TenantLimits)}
_LOOK_AGAIN = 1.0  # seconds between two looks at the file


def new_key() -> str:
    """256 random bits: a plain hash of it cannot be guessed back."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class ApiKeys:
    """Finds the tenant of a key. Without a file everybody is the same nameless tenant."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._anybody = Tenant("", salted=False, clock=clock)
        self._tenants: dict[str, Tenant] = {}
        self._by_hash: dict[str, Tenant] = {}
        self._version: tuple[int, int, int] | None = None
        self._looked = clock()
        if file is not None:
            self._read(file)

    def tenant_of(self, key: str | None) -> Tenant:
        """Raises HttpError 401. How long it takes says nothing about the keys: what is looked up is a hash of what was
        sent, and to send something whose hash begins like a known one's brings nobody nearer to that key."""
        if self._file is None:
            return self._anybody
        if self._clock() - self._looked > _LOOK_AGAIN:
            self._looked = self._clock()
            self._look_again(self._file)
        if not key:
            raise HttpError(
                401, "this server wants an API key; send it as Authorization: Bearer KEY", "missing_api_key", close=True
            )
        tenant = self._by_hash.get(hash_of(key))
        if tenant is None:
            raise HttpError(401, "this API key is not known here; check it", "invalid_api_key", close=True)
        return tenant

    def id_of(self, key: str | None) -> str | None:
        """A name for a key that may be written down: the beginning of its hash, as it is in the file."""
        return None if self._file is None or not key else hash_of(key).removeprefix("sha256:")[:12]

    def named(self, name: str) -> Tenant:
        """A tenant that was let in earlier. Raises HttpError 401 where it is not known any more."""
        tenant = self._anybody if self._file is None else self._tenants.get(name)
        if tenant is None:
            raise HttpError(401, f"the tenant {name!r} has no keys any more", "invalid_api_key")
        return tenant

    def _look_again(self, file: Path) -> None:
        """A file that cannot be read leaves the keys as they are: nobody is locked out by a half-written one."""
        try:
            if _version_of(file) != self._version:
                self._read(file)
                log.info("the keys were read anew", extra={"tenants": len(self._tenants)})
        except ConfigError as error:
            log.error("the file of keys cannot be used, the old keys stay: %s", error)

    def _read(self, file: Path) -> None:
        version = _version_of(file)
        tenants, by_hash = {}, {}
        for name, entry in read_tenants(file).items():
            given = {key: value for key, value in entry.items() if key != "keys"}
            if (names := given.get("adapters")) is not None:
                given["adapters"] = tuple(names)
            limits = TenantLimits(**given)
            known = self._tenants.get(name)
            # Who has not changed keeps what it has used of its limits.
            tenant = known if known and known.limits == limits else Tenant(name, limits, clock=self._clock)
            tenants[name] = tenant
            by_hash.update(dict.fromkeys(entry["keys"], tenant))
        self._tenants, self._by_hash, self._version = tenants, by_hash, version


def read_tenants(file: Path) -> dict[str, dict[str, Any]]:
    """The checked content of a file of keys: tenant -> {"keys": [...], limits}. Raises ConfigError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the file of keys {file} cannot be read ({error}); see `tokenmill keys --help`") from None
    tenants = content.get("tenants") if isinstance(content, dict) else None
    if not isinstance(tenants, dict):
        raise ConfigError(f'the file of keys {file} must be an object with "tenants"; see `tokenmill keys --help`')
    for name, entry in tenants.items():
        _check_entry(name, f"tenant {name!r} in {file}", entry)
    return tenants


def add_key(file: Path, tenant: str, limits: dict[str, Any]) -> str:
    """Make a key for a tenant, and note its hash and the limits that are given. Returns the key."""
    tenants = read_tenants(file) if file.exists() else {}
    key = new_key()
    entry = tenants.setdefault(tenant, {"keys": []})
    entry["keys"].append(hash_of(key))
    entry.update({name: value for name, value in limits.items() if value is not None})
    _check_entry(tenant, f"tenant {tenant!r}", entry)
    beside = file.with_name(file.name + ".new")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as new:
        json.dump({"tenants": tenants}, new, indent=2)
        new.write("\n")
        new.flush()
        os.fsync(new.fileno())  # else a crash of the machine could leave an empty file in the place of the old one
    beside.replace(file)
    return key


def _check_entry(tenant: str, whose: str, entry: Any) -> None:
    if not tenant:  # that is everybody where there are no keys
        raise ConfigError(f"{whose} has no name; give it one")
    keys = entry.get("keys") if isinstance(entry, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, str) and key.startswith("sha256:") for key in keys):
        raise ConfigError(f'{whose} needs "keys", a list of "sha256:..."')
    for name, value in entry.items():
        if name == "keys":
            continue
        if name not in _LIMITS:
            raise ConfigError(f"{whose} has {name!r}; {did_you_mean(name, _LIMITS)}")
        if name == "priority":
            if not isinstance(value, str) or value not in PRIORITIES:
                raise ConfigError(f"{whose} has priority {value!r}; it must be one of {', '.join(PRIORITIES)}")
        elif name == "adapters":
            named = isinstance(value, list) and all(isinstance(one, str) for one in value)
            if value is not None and not named:
                raise ConfigError(f"{whose} has adapters {value!r}; it must be a list of their names")
        elif name == "operator":
            if not isinstance(value, bool):
                raise ConfigError(f"{whose} has operator {value!r}; it must be true or false")
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise ConfigError(f"{whose} has {name} {value!r}; it must be a positive number")


def _version_of(file: Path) -> tuple[int, int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise ConfigError(f"the file of keys {file} cannot be read ({error})") from None
    return found.st_mtime_ns, found.st_size, found.st_ino
