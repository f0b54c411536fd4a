"""One store for all engines on the device: a process that holds it, and clients that use it as if it were their own.

`serve` is the daemon; `kvstore.connect` gives a store in one.
"""

from .service import default_socket as default_socket
from .service import serve as serve

__all__ = ["default_socket", "serve"]
