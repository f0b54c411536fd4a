"""Everything the store raises: each error names the thing that is wrong and the way out.

Damage on flash, a full disk or a vanished block are not errors of a request: the store answers with less reuse
and counts the reason. What is raised here is a mistake of the caller or a directory that cannot be used.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of all errors of this package."""


class InvalidTokensError(KVStoreError, ValueError):
    """Token ids that no tokenizer makes: none at all, negative, beyond int32, not integers, not one-dimensional."""


class LayoutMismatchError(KVStoreError, ValueError):
    """KV or a buffer whose layers, shapes or dtypes are not those of the layout the store was opened with."""


class BufferTooSmallError(KVStoreError, ValueError):
    """A buffer or slot list that cannot hold the tokens asked for."""


class InvalidRequestError(KVStoreError, ValueError):
    """Arguments that contradict one another or what is held."""


class BudgetError(KVStoreError, ValueError):
    """A profile whose budgets cannot hold even one block."""


class EncryptionError(KVStoreError, ValueError):
    """A key that is none, is missing, cannot be read or kept, or a package that encryption needs is not there."""


class LeaseReleasedError(KVStoreError, RuntimeError):
    """A lease used or released after its release."""


class StoreClosedError(KVStoreError, RuntimeError):
    """A store, or a lease of it, used after close()."""


class DirectoryInUseError(KVStoreError, RuntimeError):
    """Another process owns the data directory."""


class DirectoryUnusableError(KVStoreError, OSError):
    """The data directory cannot be created, written, or is something else."""


class FormatMismatchError(KVStoreError, RuntimeError):
    """The data directory was written in another format, or for another block size. It is left untouched."""


class DaemonError(KVStoreError, RuntimeError):
    """A daemon that cannot be talked to, or that failed at a request in a way of its own."""


class DaemonLostError(DaemonError):
    """The connection to the daemon broke, or the daemon does not answer. What it named must not be trusted any more."""


class DaemonRunningError(DaemonError):
    """Another daemon listens on the socket."""
