"""Requests to a reward server: its address and token, what may be tried again, and what it says without the token in it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NoReturn
from urllib.parse import urlsplit

from dsreason.errors import ConfigError
from dsreason.files import http
from dsreason.screen import in_one_line
from dsreason.secrets import fits_header

LONGEST_PAUSE = 30.0
MAX_ANSWER_BYTES = 64 * 2**20
PREFIXES = ("REMOTE_REWARD_", "WFM_REWARD_")
"""cosmos-rl's names of the environment variables, the new and the old ones."""


class Retry(Exception):
    """A failure that may pass: no connection, too slow, or a status that says so."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait
        """Seconds that the server asks to wait at least."""

    def pause(self, first: float, attempt: int) -> float:
        """Seconds until the next attempt: `first`, doubled for every further one, or what the server asks for."""
        return min(max(first * 2.0**attempt, self.wait), LONGEST_PAUSE)


class Refused(Exception):
    """A status that will be the same on another try."""


class Unusable(Refused):
    """An answer that is too long, or packed in an unknown way."""


class RewardServer:
    """One address of a reward server. The token goes into the `Authorization` header and nowhere else.

    Args:
        what: the server is called so in messages.
        token_name: the environment variable of the token.
        max_bytes: of an answer; a longer one is an error.
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
            raise ConfigError(f"the {what}'s address must be http://host… or https://host…: {self.place}")
        if "@" in urlsplit(url).netloc:
            raise ConfigError(f"no user and password in the {what}'s address; use a token: {self.place}")
        if token is not None and not fits_header(token):
            raise ConfigError(f"the {what}'s token has characters that an HTTP header cannot hold (a line break?)")

    @property
    def place(self) -> str:
        """The address without user, password and query, which may hold secrets."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    async def answer(
        self, body: bytes, headers: Mapping[str, str], limit: float, *, expected: Iterable[int] = ()
    ) -> tuple[int, bytes]:
        """Status and content of an answer of success, or with a status that is `expected`.

        Args:
            limit: seconds until the whole answer must be there.

        Raises:
            Retry, Refused: there is none.
        """
        sent = dict(headers) | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        try:
            answer = await http.answer_to(
                "POST", self.url, content=body, headers=sent, limit=limit, max_bytes=self.max_bytes
            )
        except http.NoAnswer as error:
            raise Retry(self.without_token(str(error))) from None
        except http.BadAnswer as error:
            raise Unusable(self.quoted(str(error))) from None
        if not answer.is_success and answer.status not in expected:
            self._raise_for_status(answer)
        return answer.status, answer.content

    def post(
        self, body: bytes, headers: Mapping[str, str], limit: float, *, expected: Iterable[int] = ()
    ) -> tuple[int, bytes]:
        """As `answer`, waited for in any thread."""
        return http.wait_for(self.answer(body, headers, limit, expected=expected))

    def _raise_for_status(self, answer: http.Answer) -> NoReturn:
        status = answer.status
        text = f"status {status} {self.quoted(answer.reason)}"
        if answer.content:
            text += f" ({self.quoted(answer.text)})"
        if status in (408, 425, 429) or status >= 500:
            raise Retry(text, wait=answer.retry_after)
        if status in (401, 403):
            problem = "the server rejects the token" if self.token else "the server requires a token"
            text += f": {problem}, check {self.token_name}"
        elif status < 400:
            text += f": {http.REDIRECTED}"
        raise Refused(text)

    def quoted(self, text: str) -> str:
        """The beginning of what the server said, without the token, should it be in there."""
        clean = in_one_line(self.without_token(text))
        return clean if len(clean) <= 200 else f"{clean[:200]}…"

    def without_token(self, text: str) -> str:
        return text.replace(self.token, "***") if self.token else text


def variable(name: str) -> str | None:
    """The environment's `REMOTE_REWARD_<name>` or `WFM_REWARD_<name>`; ConfigError if both are set and differ."""
    new, old = (os.environ.get(prefix + name, "").strip() or None for prefix in PREFIXES)
    if new is not None and old is not None and new != old:
        raise ConfigError(f"{PREFIXES[0]}{name} and {PREFIXES[1]}{name} are set and differ; unset one")
    return new or old
