"""Encryption at rest: what a directory that is opened with keys leaves on flash tells nothing of tokens or KV.

    key = kvstore.KeyFile("~/keys")                       # or 32 bytes, or kvstore.Keyring()
    with kvstore.open(path, identity=identity, key=key) as store: ...

Each tenant has a key of its own: `keys` says where from, `ciphers` which opens what. Here is what one key does.

AES-256-GCM: of what `cryptography` has it was measured to be twice as fast as ChaCha20-Poly1305 where the CPU helps,
and it takes the pieces of a frame one by one, so that they are decrypted straight to their place.

Nonces. GCM is broken by two messages under one key and nonce. So a tenant's key encrypts nothing itself. All that is
written at a time (a record, an index, a small file) has a key of its own: BLAKE2b-256 of a salt of 24 random bytes,
keyed with the tenant's. Under that, messages have consecutive numbers as nonces: header 0, frames 1, 2, … What is
written again gets a new salt; of 2^32 two are the same with a chance of 2^-129. No counter has to be kept, none can be
lost, and no message of one record authenticates as one of another, or of another place in the same.

Names. A block's key is a hash of its tokens, so who guesses a prompt could look whether it is held. File names and rows
of the index are named by a keyed hash of it instead.

In clear stay: sizes and times of files, how many blocks there are, what identities stand for and were measured to
bear, and the first 8 bytes of a hash that tells whose key is needed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import EncryptionError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KEY_BYTES = 32
SALT_BYTES = 24
TAG_BYTES = 16
ID_BYTES = 8


class OtherKeyError(Exception):
    """Encrypted under another key than the one at hand, or not encrypted though a key is."""


class AlteredError(Exception):
    """Encrypted under this key, and not what was written."""


class Key:
    """32 secret bytes. Never shown: not by `repr`, not in errors. Raises EncryptionError."""

    def __init__(self, secret: bytes) -> None:
        if not isinstance(secret, bytes) or len(secret) != KEY_BYTES:
            raise EncryptionError(f"a key is {KEY_BYTES} random bytes; kvstore.Key.generate() makes one")
        self.secret = secret

    @classmethod
    def generate(cls) -> Key:
        return cls(secrets.token_bytes(KEY_BYTES))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and hmac.compare_digest(self.secret, other.secret)

    def __hash__(self) -> int:
        return hash(self.secret)

    def __repr__(self) -> str:
        return "Key(…)"


class Cipher:
    """What is done with one key. Raises EncryptionError where the package `cryptography` is missing."""

    def __init__(self, key: Key) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import aead  # noqa: F401
        except ImportError as error:
            raise EncryptionError(
                "encryption needs the package cryptography: pip install 'npu-kvstore[encryption]'"
            ) from error
        self._writing = _derived(key.secret, b"", b"kvstore.write")
        self._naming = _derived(key.secret, b"", b"kvstore.name")
        self.id = _derived(key.secret, b"", b"kvstore.id")[:ID_BYTES]
        """Tells which key is needed, and nothing else of it."""
        self.key = key

    def name(self, block_key: bytes) -> bytes:
        """What a block is called on flash, 16 bytes."""
        return _derived(self._naming, block_key, b"kvstore.block")[:16]

    def sealing(self) -> Sealing:
        """For what is written now."""
        salt = secrets.token_bytes(SALT_BYTES)
        return Sealing(_derived(self._writing, salt, b"kvstore.seal"), self.id + salt)

    def unsealing(self, clear: bytes) -> Sealing:
        """For what was written with `clear` before it. Raises OtherKeyError."""
        if clear[:ID_BYTES] != self.id or len(clear) != CLEAR_BYTES:
            raise OtherKeyError
        return Sealing(_derived(self._writing, clear[ID_BYTES:], b"kvstore.seal"), clear)

    def seal(self, plain: bytes) -> bytes:
        """A small file as it is stored."""
        sealing = self.sealing()
        return sealing.clear + sealing.seal(0, plain)

    def open(self, stored: bytes) -> bytes:
        """What `seal` was given. Raises OtherKeyError, AlteredError."""
        return self.unsealing(stored[:CLEAR_BYTES]).open(0, stored[CLEAR_BYTES:])


CLEAR_BYTES = ID_BYTES + SALT_BYTES
"""Of what stands in clear before what is sealed."""


class Sealing:
    """One key, for messages that are written at a time, each under a number of its own. `clear` is stored with them."""

    def __init__(self, secret: bytes, clear: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self.clear = clear
        self._secret = secret
        self._whole = AESGCM(secret)

    def seal(self, number: int, plain: bytes) -> bytes:
        """A short message, TAG_BYTES longer than `plain`."""
        return self._whole.encrypt(_nonce(number), plain, self.clear)

    def open(self, number: int, sealed: bytes) -> bytes:
        """Raises AlteredError."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._whole.decrypt(_nonce(number), sealed, self.clear)
        except (InvalidTag, ValueError) as error:  # ValueError: too short for a tag
            raise AlteredError from error

    def encrypt(
        self, number: int, pieces: Sequence[bytes | memoryview]
    ) -> tuple[list[bytes | memoryview], bytes]:
        """A long message: its pieces, as long as they were, and the tag of all."""
        encryptor = self._cipher(number).encryptor()
        encryptor.authenticate_additional_data(self.clear)
        sealed: list[bytes | memoryview] = [encryptor.update(piece) for piece in pieces]
        encryptor.finalize()
        return sealed, encryptor.tag

    def decryption(self, number: int) -> Decryption:
        decryptor = self._cipher(number).decryptor()
        decryptor.authenticate_additional_data(self.clear)
        return Decryption(decryptor)

    def _cipher(self, number: int) -> Any:
        from cryptography.hazmat.primitives.ciphers import Cipher as Ciphers
        from cryptography.hazmat.primitives.ciphers import algorithms, modes

        return Ciphers(algorithms.AES(self._secret), modes.GCM(_nonce(number)))


class Decryption:
    """A long message, decrypted as it is read. Nothing of it may be used before `finish`."""

    def __init__(self, decryptor: Any) -> None:
        self._decryptor = decryptor

    def update(self, sealed: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Decrypt the next bytes into `out` (uint8, as many)."""
        if len(sealed):
            self._decryptor.update_into(sealed.data, out.data)

    def finish(self, tag: bytes) -> None:
        """Raises AlteredError unless all was what was written."""
        from cryptography.exceptions import InvalidTag

        try:
            self._decryptor.finalize_with_tag(tag)
        except (InvalidTag, ValueError) as error:
            raise AlteredError from error


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def _derived(secret: bytes, message: bytes, purpose: bytes) -> bytes:
    """Keyed BLAKE2b, which is a pseudorandom function (RFC 7693, section 2.9)."""
    return hashlib.blake2b(message, key=secret, digest_size=KEY_BYTES, person=purpose).digest()
