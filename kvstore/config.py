"""Configuration of daemon and command line: one TOML file, environment variables, flags, the later the stronger.

    # kvstore/config.toml in the user's configuration folder, or where $KVSTORE_CONFIG says
    directory = "~/.cache/kvstore/kv"
    profile = "nnapi"                  # what the device allows; the settings below change parts of it
    warm_bytes = "1 GiB"

Each setting has the same name everywhere: `warm_bytes` in the file, KVSTORE_WARM_BYTES in the environment. The library
reads none of this by itself: `kvstore.open` takes a `Profile`, and `load().device()` gives one.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import os
import re
import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import platformdirs

from kvstore.index.embedder import Embedder, EmbedderUnavailable
from kvstore.index.sentence_embedder import SentenceEmbedder
from kvstore.index.word_embedder import WordEmbedder
from kvstore.prefetch.cost import DEVICES
from kvstore.prefetch.eviction import POLICIES

from .codec import Codec
from .errors import BudgetError, KVStoreError
from .flash.keys import KeyFile, Keyring, KeySource
from .profile import PROFILES, Profile

log = logging.getLogger(__name__)

_PREFIX = "KVSTORE_"
_OTHERS = {
    "KVSTORE_CACHE_DIR",
    "KVSTORE_CONFIG",
    "KVSTORE_DAEMON",
    "KVSTORE_DOCS_SCREENSHOTS",
    "KVSTORE_KERNELS",
    "KVSTORE_STRESS_SECONDS",
}
"""Environment variables that say something else."""

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}

_BUILTIN = "builtin"

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class ConfigError(KVStoreError, ValueError):
    """A setting that is unknown or has a value that is not allowed. Names it, where it was set, and what is allowed."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting. `profile` gives what is None: see `Profile` for the fields of that name.

    key_file, keyring: where the keys are that encrypt what lies on flash, a file or a name in the keyring of the
        operating system; "" for neither: see `keys`.
    embedder: what says of texts what they speak of, "builtin" or the folder of a sentence-transformers model; "" for
        none.
    http: address and port of the web page and the metrics, on loopback; "" for none.
    """

    directory: str
    socket: str
    profile: str = "cpu"
    key_file: str = ""
    keyring: str = ""
    embedder: str = ""
    http: str = ""
    log_level: LogLevel = "warning"
    log_format: LogFormat = "text"
    block_tokens: int | None = None
    hot_bytes: int | None = None
    warm_bytes: int | None = None
    cold_bytes: int | None = None
    cold_bytes_per_day: int | None = None
    staging_bytes: int | None = None
    tenant_memory_bytes: int | None = None
    tenant_cold_bytes: int | None = None
    codec: Codec | None = None
    eviction: str | None = None
    device: str | None = None


_BYTES = (
    "hot_bytes",
    "warm_bytes",
    "cold_bytes",
    "cold_bytes_per_day",
    "staging_bytes",
    "tenant_memory_bytes",
    "tenant_cold_bytes",
)
_PROFILE_FIELDS = ("block_tokens", *_BYTES, "codec", "eviction", "device")


class Setting(msgspec.Struct, frozen=True):
    """A value and where it comes from: "default", "profile nnapi", a file with its line, a variable or a flag."""

    value: str | int | None
    origin: str


class Config:
    """All settings, each with its origin; `load` makes one."""

    def __init__(self, settings: Settings, origins: Mapping[str, str], file: Path) -> None:
        self.settings = settings
        self.file = file
        """Where the file is, or would be."""
        self._origins = origins

    @property
    def directory(self) -> Path:
        return Path(self.settings.directory).expanduser()

    @property
    def socket(self) -> Path:
        return Path(self.settings.socket).expanduser()

    def key(self) -> KeySource | None:
        """Where keys come from; None: nothing is encrypted. Raises ConfigError."""
        file, name = self.settings.key_file, self.settings.keyring
        if file and name:
            where = self._origins.get("key_file"), self._origins.get("keyring")
            raise ConfigError(f"key_file ({where[0]}) and keyring ({where[1]}): set one of them")
        return KeyFile(file) if file else Keyring(name) if name else None

    def embedder(self) -> Embedder | None:
        """What a daemon embeds texts with. Raises ConfigError where it cannot run."""
        named = self.settings.embedder
        if named in ("", _BUILTIN):
            return WordEmbedder() if named else None
        try:
            return SentenceEmbedder(Path(named).expanduser())
        except EmbedderUnavailable as error:
            where = self._origins.get("embedder", "default")
            raise ConfigError(
                f"embedder = {named!r} ({where}): {error}; {_BUILTIN!r} needs no model"
            ) from error

    def device(self) -> Profile:
        """The profile with what was set of it. Raises ConfigError where that does not go together."""
        changes = {
            name: value for name in _PROFILE_FIELDS if (value := getattr(self.settings, name)) is not None
        }
        try:
            return msgspec.structs.replace(PROFILES[self.settings.profile], **changes)
        except BudgetError as error:
            blamed = next((name for name in changes if str(error).startswith(name)), None)
            where = self._origins.get(blamed or "profile", "default")
            raise ConfigError(f"{error} ({where})") from error

    def shown(self) -> dict[str, Setting]:
        """Every setting with its value in use."""
        device, found = self.device(), dict[str, Setting]()
        for name in Settings.__struct_fields__:
            value, origin = getattr(self.settings, name), self._origins.get(name, "default")
            if name in _PROFILE_FIELDS and value is None:
                value, origin = getattr(device, name), f"profile {self.settings.profile}"
            found[name] = Setting(value, origin)
        return found


def default_file() -> Path:
    """Where the configuration file is looked for without $KVSTORE_CONFIG."""
    return Path(platformdirs.user_config_dir("kvstore")) / "config.toml"


def load(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Settings of the file, changed by the environment, changed by flags (name -> value; None is not set).

    file: by default $KVSTORE_CONFIG, which has to exist then, else `default_file()`, which may be missing. Raises
    ConfigError.
    """
    environment = os.environ if environment is None else environment
    named = file or (Path(environment["KVSTORE_CONFIG"]) if environment.get("KVSTORE_CONFIG") else None)
    path = named or default_file()
    values: dict[str, tuple[Any, str]] = {}
    values |= _of_file(path.expanduser(), must_exist=named is not None)
    values |= _of_environment(environment)
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = value, f"--{name.replace('_', '-')}"
    settings: dict[str, Any] = {"directory": _default_directory(), "socket": _default_socket()}
    for name, (value, origin) in values.items():
        settings[name] = _converted(name, value, origin)
    return Config(Settings(**settings), {name: origin for name, (_, origin) in values.items()}, path)


def _default_directory() -> str:
    return str(Path(platformdirs.user_cache_dir("kvstore")) / "kv")


def _default_socket() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # where no session made such a folder, the one that stands in is as good
        return str(platformdirs.user_runtime_path("kvstore") / "daemon.sock")  # as `daemon.default_socket`


def _of_file(path: Path, *, must_exist: bool) -> dict[str, tuple[Any, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"{path} does not exist; make it or name another file") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return {name: (value, f"{path}, line {_line(text, name)}") for name, value in values.items()}


def _line(text: str, name: str) -> int:
    """The line that sets `name`; all settings are on the top level."""
    pattern = re.compile(rf"""\s*(\[\s*)?["']?{re.escape(name)}["']?\s*[=.\]]""")
    lines = enumerate(text.splitlines(), start=1)
    return next((number for number, line in lines if pattern.match(line)), 1)


def _of_environment(environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for variable, value in environment.items():
        if not variable.startswith(_PREFIX) or variable in _OTHERS:
            continue
        name = variable.removeprefix(_PREFIX).lower()
        if name in Settings.__struct_fields__:
            found[name] = value, variable
        else:  # may be meant for something else; a misspelt one is worth a word
            log.warning("%s is no setting%s", variable, _nearest(name))
    return found


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, Settings.__struct_fields__, 1)
    return f"; is {close[0]} meant?" if close else ""


def _converted(name: str, value: Any, origin: str) -> Any:
    """A value as its setting wants it. Raises ConfigError."""

    def refuse(allowed: str) -> ConfigError:
        return ConfigError(f"{name} = {value!r} ({origin}): {allowed}")

    if name not in Settings.__struct_fields__:
        known = ", ".join(Settings.__struct_fields__)
        raise ConfigError(f"{name} ({origin}) is no setting{_nearest(name) or f'; there are {known}'}")
    if name in _BYTES:
        nbytes = _bytes(value)
        if nbytes is None:
            raise refuse('a number of bytes is needed, such as 536870912 or "512 MiB"')
        return nbytes
    if name == "block_tokens":
        if isinstance(value, str) and re.fullmatch("[0-9]+", value.strip()):
            value = int(value)
        if type(value) is not int or not 1 <= value <= 4096:
            raise refuse("a number from 1 to 4096 is needed, above 16 a multiple of 16")
        return value
    allowed: tuple[str, ...] | None = {
        "profile": tuple(PROFILES),
        "log_level": get_args(LogLevel),
        "log_format": get_args(LogFormat),
        "codec": get_args(Codec),
        "eviction": tuple(POLICIES),
        "device": tuple(DEVICES),
    }.get(name)
    if allowed is not None and value not in allowed:
        raise refuse(f"allowed are {', '.join(allowed)}")
    if not isinstance(value, str) or (name in ("directory", "socket") and not value):
        raise refuse("a text is needed" if not isinstance(value, str) else "a path is needed")
    if name == "http" and value and not _is_loopback(value):
        raise refuse('an address and a port on loopback are needed, such as "127.0.0.1:9810", or "" for none')
    return value


def _bytes(value: Any) -> int | None:
    if type(value) is int:
        return value if value >= 0 else None
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", value.lower())
        if found is not None and found[2] in _UNITS:
            return (
                int(float(found[1]) * _UNITS[found[2]])
                if "." in found[1]
                else int(found[1]) * _UNITS[found[2]]
            )
    return None


def _is_loopback(value: str) -> bool:
    host, colon, port = value.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or not 0 <= int(port) <= 65_535:
        return False
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
