"""Everything that must be equal for KV to be reusable, and which part differs when it is not.

KV of the same tokens differs with the weights, their quantisation, the adapters at work, the tokenizer that gave
the ids their meaning, and the layout. Each of these is named by its content: a name can be given to something
else, and engines that trusted names served one adapter's KV for another's. The tenant's salt keeps apart what belongs
to different users though all else is equal. Token ids, special tokens among them, are no part of it: they are
compared themselves.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from os import PathLike, fstat
from typing import Any

import msgspec

from kvstore.codec import Codec
from kvstore.errors import KVStoreError
from kvstore.layout import LayerLayout, Layout, layer_ranges

FORMAT_VERSION = 2
"""Of stored KV: its raw form (see `layout`) and the encoding that digests are made of. A change makes all KV stale."""


class IdentityError(KVStoreError, ValueError):
    """A part of an identity that is not what it should be, or bytes that hold no identity."""


class Adapter(msgspec.Struct, frozen=True, order=True):
    """An adapter (LoRA) at work: hex digest of its content, and the scale it is applied with."""

    digest: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        _set(self, "digest", _content("adapter", self.digest))
        _set(self, "scale", float(self.scale) + 0.0)  # -0.0 and 0.0 are one scale
        if not abs(self.scale) < float("inf"):
            raise IdentityError(
                f"adapter {_short(self.digest)} has scale {self.scale}, a finite number is needed"
            )


class Difference(msgspec.Struct, frozen=True):
    """A part in which two identities differ, with both values as text."""

    part: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.part}: {self.ours} ≠ {self.theirs}"


class Identity(msgspec.Struct, frozen=True, dict=True, kw_only=True):
    """What a stored token's KV depends on besides the tokens before it.

    weights, tokenizer: hex digests of their content, see `digest_file`.
    quantisation: how weights and activations are quantised when the graph runs, in the engine's own words; it
        tells apart graphs that the weights file alone does not ("W4A16", "Q4_0 → float32").
    adapters: those at work, in any order.
    projector: hex digest of what turns images or sound into embeddings, empty for text alone.
    tenant_salt: bytes that only one tenant has, empty for none. Just a digest of them is kept, so that neither
        repr, diff nor the notes beside stored KV give them away; a salt digested already stays as it is.
    codec: what KV may have gone through on flash, or what it was computed behind may have; see `codec`.
    """

    weights: str
    tokenizer: str
    layout: Layout
    quantisation: str
    adapters: tuple[Adapter, ...] = ()
    projector: str = ""
    tenant_salt: bytes = b""
    codec: Codec = "lossless"
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        _set(self, "weights", _content("weights", self.weights))
        _set(self, "tokenizer", _content("tokenizer", self.tokenizer))
        _set(self, "projector", self.projector and _content("projector", self.projector))
        try:  # through the declared types, so that a theta of 10000 and one of 10000.0 are one
            _set(self, "layout", msgspec.msgpack.decode(msgspec.msgpack.encode(self.layout), type=Layout))
        except (TypeError, msgspec.ValidationError) as error:
            raise IdentityError(f"layout: {error}") from error
        _set(self, "adapters", tuple(sorted(self.adapters)))
        digests = [adapter.digest for adapter in self.adapters]
        if twice := next((digest for digest in digests if digests.count(digest) > 1), None):
            raise IdentityError(
                f"adapter {_short(twice)} is named twice: name it once, with the sum of its scales"
            )
        _set(self, "tenant_salt", _hidden(self.tenant_salt))

    def digest(self) -> bytes:
        """32 bytes, equal for two identities if and only if all their parts are equal."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.blake2b(self.to_bytes(), digest_size=32, person=b"kvstore.identity").digest()

    def diff(self, other: Identity) -> list[Difference]:
        """The parts that differ; none if and only if the digests are equal. Of tenants, only that they differ."""
        return [*_differences("", self, other)]

    def to_bytes(self) -> bytes:
        """msgpack of all parts in a fixed order: lengths before contents, each number in one spelling."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """What `to_bytes` wrote, of any format version with the same parts. Raises IdentityError for all else."""
        try:
            identity = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, ValueError) as error:
            raise IdentityError(f"these {len(data)} bytes hold no identity: {error}") from error
        if identity.to_bytes() != data:
            raise IdentityError(
                f"these {len(data)} bytes hold more than an identity of format {FORMAT_VERSION}"
            )
        return identity

    def __str__(self) -> str:
        adapters = (
            ", ".join(f"{_short(each.digest)} × {each.scale}" for each in self.adapters) or "no adapter"
        )
        return (
            f"weights {_short(self.weights)} ({self.quantisation}), {adapters}, {len(self.layout.layers)} layers, "
            f"{self.layout.token_bytes} bytes of {self.layout.dtype} a token, format {self.format_version}"
            + (", of a tenant" if self.tenant_salt else "")
            + (f", {self.codec} on flash" if self.codec != "lossless" else "")
        )


def digest_file(path: str | PathLike[str], progress: Callable[[int, int], None] | None = None) -> str:
    """SHA-256 of a file's content in hex, as `sha256sum` and model hubs give it.

    `progress(done, total)` is called with bytes after each MiB. Raises OSError.
    """
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(1 << 20))
    done = 0
    with open(path, "rb", buffering=0) as file:
        total = fstat(file.fileno()).st_size
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            done += count
            if progress is not None:
                progress(done, total)
    return digest.hexdigest()


_set = msgspec.structs.force_setattr
_HIDDEN = b"blake2b:"


def _content(part: str, digest: str) -> str:
    """The digest in lower case. Raises IdentityError for what is none, such as the name of a model."""
    if not re.fullmatch("([0-9a-f]{2}){16,}", digest.lower()):
        raise IdentityError(f"{part} {digest!r} is no hex digest of its content; digest_file(path) makes one")
    return digest.lower()


def _hidden(salt: bytes) -> bytes:
    if not salt or (salt.startswith(_HIDDEN) and len(salt) == len(_HIDDEN) + 32):
        return salt
    return _HIDDEN + hashlib.blake2b(salt, digest_size=32, person=b"kvstore.tenant").digest()


def _short(digest: str) -> str:
    return digest[:16] + "…"


def _differences(part: str, ours: Any, theirs: Any) -> Iterator[Difference]:
    """Walk two values that sit at the same place, down to what differs."""
    if ours == theirs:
        return
    if part == "tenant_salt":
        yield Difference(part, *("not shown" if salt else "none" for salt in (ours, theirs)))
    elif part == "adapters":
        yield from _adapter_differences(ours, theirs)
    elif part == "layout.layers":
        yield from _layer_differences(ours, theirs)
    elif isinstance(ours, msgspec.Struct) and type(ours) is type(theirs):
        for name in ours.__struct_fields__:
            inner = f"{part}.{name}" if part else name
            yield from _differences(inner, getattr(ours, name), getattr(theirs, name))
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        pairs = [(n, a, b) for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        number, first, second = pairs[0]
        more = f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""
        yield Difference(f"{part}[{number}]{more}", _text(first), _text(second))
    else:
        yield Difference(part, _text(ours), _text(theirs))


def _adapter_differences(ours: tuple[Adapter, ...], theirs: tuple[Adapter, ...]) -> Iterator[Difference]:
    scales = [{adapter.digest: adapter.scale for adapter in adapters} for adapters in (ours, theirs)]
    for digest in sorted({*scales[0], *scales[1]}):
        first, second = (scale.get(digest) for scale in scales)
        if first is None or second is None:
            texts = ["absent" if scale is None else f"scale {scale}" for scale in (first, second)]
            yield Difference(f"adapters[{_short(digest)}]", *texts)
        elif first != second:
            yield Difference(f"adapters[{_short(digest)}].scale", str(first), str(second))


def _layer_differences(
    ours: tuple[LayerLayout, ...], theirs: tuple[LayerLayout, ...]
) -> Iterator[Difference]:
    """Layers that differ alike are named together."""
    if len(ours) != len(theirs):
        yield Difference("layout.layers", f"{len(ours)} layers", f"{len(theirs)} layers")
    alike: dict[Difference, list[int]] = {}
    for number, (first, second) in enumerate(zip(ours, theirs, strict=False)):
        for difference in _differences("", first, second):
            alike.setdefault(difference, []).append(number)
    for difference, numbers in alike.items():
        yield msgspec.structs.replace(
            difference, part=f"layout.layers[{layer_ranges(numbers)}].{difference.part}"
        )


def _text(value: Any) -> str:
    """Readable in one line."""
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{32,}", value):
        return _short(value)
    text = "none" if value is None else repr(value)
    return text if len(text) <= 100 else text[:99] + "…"
