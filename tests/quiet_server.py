"""An HTTP server for tests whose clients may hang up."""

from __future__ import annotations

from http.server import ThreadingHTTPServer
from typing import Any


class QuietServer(ThreadingHTTPServer):
    """Prints nothing if a client has gone: another test may be reading what is printed."""

    def handle_error(self, request: Any, client_address: Any) -> None: ...
