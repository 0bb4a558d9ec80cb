"""Client for a reward server: its URL and token, failures that may be retried, and responses with the token masked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NoReturn
from urllib.parse import urlsplit

from dsreason.errors import ConfigError
from dsreason.files import http
from dsreason.screen import to_one_line
from dsreason.secrets import is_header_safe

LONGEST_PAUSE = 30.0
MAX_ANSWER_BYTES = 64 * 2**20
PREFIXES = ("REMOTE_REWARD_", "WFM_REWARD_")
"""Prefixes of cosmos-rl's environment variables: the current one and the old one."""


class Retry(Exception):
    """Error for a failure that may be temporary: no connection, a timeout, or a status after which a retry makes sense."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait
        """Minimum number of seconds to wait before a retry, as requested by the server."""

    def pause(self, first: float, attempt: int) -> float:
        """Return the seconds until the next attempt: `first`, doubled per attempt, or what the server requested if longer."""
        return min(max(first * 2.0**attempt, self.wait), LONGEST_PAUSE)


class Refused(Exception):
    """Error for a status that a retry would not change."""


class Unusable(Refused):
    """Error for a response that is too long, or compressed in an unknown format."""


class RewardServer:
    """Client for one URL of a reward server. The token is sent in the `Authorization` header and appears nowhere else.

    Args:
        what: name of the server, for messages.
        token_name: environment variable that holds the token.
        max_bytes: maximum size of a response; a larger response is an error.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        what: str = "reward server",
        token_name: str = "REMOTE_REWARD_TOKEN",
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self.url, self.token = url, token
        self.what, self.token_name, self.max_bytes = what, token_name, max_bytes
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(f"the {what}'s URL must be http://host… or https://host…; got {self.place}")
        if "@" in urlsplit(url).netloc:
            raise ConfigError(
                f"the {what}'s URL ({self.place}) must not contain a user name or password; use a token instead"
            )
        if token is not None and not is_header_safe(token):
            raise ConfigError(
                f"the {what}'s token contains characters that are not allowed in an HTTP header; check it for line "
                "breaks"
            )

    @property
    def place(self) -> str:
        """The URL without user, password and query, because these may contain secrets."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    async def answer(
        self, body: bytes, headers: Mapping[str, str], limit: float, *, expected: Iterable[int] = ()
    ) -> tuple[int, bytes]:
        """Send a request; return the status and content of the response.

        Args:
            limit: seconds within which the complete response must arrive.
            expected: error statuses that are returned instead of raised.

        Raises:
            Retry, Refused: the request failed.
        """
        request_headers = dict(headers) | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        try:
            answer = await http.send_request(
                "POST", self.url, content=body, headers=request_headers, limit=limit, max_bytes=self.max_bytes
            )
        except http.NoAnswer as error:
            raise Retry(self.mask_token(str(error))) from None
        except http.BadAnswer as error:
            raise Unusable(self.quote(str(error))) from None
        if not answer.is_success and answer.status not in expected:
            self._raise_for_status(answer)
        return answer.status, answer.content

    def post(
        self, body: bytes, headers: Mapping[str, str], limit: float, *, expected: Iterable[int] = ()
    ) -> tuple[int, bytes]:
        """Send a request like `answer`, but block until the response arrives; may be called from any thread."""
        return http.wait_for(self.answer(body, headers, limit, expected=expected))

    def _raise_for_status(self, answer: http.HttpResponse) -> NoReturn:
        status = answer.status
        text = f"status {status} {self.quote(answer.reason)}"
        if answer.content:
            text += f" ({self.quote(answer.text)})"
        if status in (408, 425, 429) or status >= 500:
            raise Retry(text, wait=answer.retry_after)
        if status in (401, 403):
            problem = "the server rejects the token; check" if self.token else "the server requires a token; set"
            text += f": {problem} {self.token_name}"
        elif status < 400:
            text += f": {http.REDIRECTED}"
        raise Refused(text)

    def quote(self, text: str) -> str:
        """Return the beginning of a text from the server, on one line and with the token masked."""
        clean = to_one_line(self.mask_token(text))
        return clean if len(clean) <= 200 else f"{clean[:200]}…"

    def mask_token(self, text: str) -> str:
        return text.replace(self.token, "***") if self.token else text


def read_variable(name: str) -> str | None:
    """Return the value of `REMOTE_REWARD_<name>` or `WFM_REWARD_<name>`; raise ConfigError if both are set and differ."""
    new, old = (os.environ.get(prefix + name, "").strip() or None for prefix in PREFIXES)
    if new is not None and old is not None and new != old:
        raise ConfigError(f"{PREFIXES[0]}{name} and {PREFIXES[1]}{name} have different values; unset one of them")
    return new or old
