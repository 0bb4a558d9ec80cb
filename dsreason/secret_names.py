"""The rule that decides which names belong to secrets.

The same rule applies to configuration keys, options, HTTP headers, environment variables, URL parameters and JSON keys. The
exception is a few ambiguous words, which are secret only in variables, headers and URLs.
"""

from __future__ import annotations

import re
from functools import lru_cache


def read_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
"""Pattern for the individual words in names such as `api_key`, `x-api-key`, `apiKey`, `APIKey` and `API_KEY2`."""
ENDINGS = (
    *("password", "passwd", "pwd", "passphrase", "passcode", "secret", "credential"),
    *("apikey", "authkey", "accesskey", "accesskeyid", "accountkey", "privatekey", "secretkey", "subscriptionkey"),
    *("authtoken", "accesstoken", "refreshtoken", "bearertoken", "sastoken", "hftoken", "apitoken", "authorization"),
    *("connectionstring", "connstring", "connstr", "sessionid", "sessid", "sessionkey", "webhookurl", "secretid"),
    *("accesssignature", "authcode", "accesscode", "sasurl", "sasuri", "signedurl", "serviceaccountjson"),
)
"""Suffixes of secret names, with or without word separators: `db_password`, `PGPASSWORD`, `Api-Key`, `clientsecret`."""
SECRET_WORDS = read_words(
    "token key pw pass auth oauth bearer cookie cookies session sas sig signature dsn jwt jwk jwks hmac pat otp cred creds "
    "webhook"
)
"""Last words of secret names."""
JOINED = re.compile("(.+)(token|key|pass)")
"""Pattern for a word that ends in a secret word: `githubtoken`, `masterkey`, `dbpass`."""
COUNTED = read_words("per each max min num")
"""Words that make any name harmless if they precede its last word: `cost_per_token`."""
HARMLESS = {
    "token": read_words(
        "eos bos pad unk sep cls mask image video audio vision stop end start begin next first last special turn think "
        "box new input output decoder encoder prompt padding completion response total generated reasoning cached mean avg "
        "call tool assistant chosen rejected reference logprob thinking patch grid frame time object modality mm sub"
    ),
    "key": read_words(
        "score data row field column image video media audio clip text prompt question answer response completion message "
        "messages label id index sort group cache primary foreign partition metric meta dict json config state parameter "
        "weight tensor layer registry reward class caption path file name item time step map fn "
        "gold problem solution option target source object sample category context instruction template conversation tool "
        "feature lookup choice entry tag split subset timestamp unique hash bucket truth prefix frame task value letter uuid "
        "mon tur hoc don joc whis hot sub"
    ),
    "pass": read_words(
        "forward backward single multi first second one two full must low high band by prompt test fail com encom sur tres"
    ),
    "signature": read_words("function method class tool call reward"),
}
"""Secret last word → words before it, or beginnings of the word itself, that make the name harmless: `eos_token`, `monkey`."""
AMBIGUOUS = read_words("key pass session signature")
"""Words that, on their own, are secret only in variables, headers and URLs; the same is true of plurals such as `GH_TOKENS`."""
QUALIFIERS = read_words(
    "value val plain base prod production dev staging test read write ro rw primary secondary backup old new default hash "
    "header headers str string text pem json v b"
)
"""Words that may follow the one that makes a name secret: `HF_TOKEN_READ`, `API_KEY_V2`, `password_b64`."""
VARIABLE_WORDS = read_words("env environment variable var")
"""Last words of keys whose values name an environment variable with a secret: `token_env`, `api_key_variable`."""


@lru_cache(maxsize=4096)
def is_secret_name(name: str, *, ambiguous: bool = False) -> bool:
    """Return whether a name belongs to a secret: `hf_token`, `X-Api-Key` or `dbPassword`, but not `max_tokens` or `author`.

    The name of a function in a file, such as `judge.py:token`, is not secret.

    Args:
        ambiguous: whether ambiguous words count, as they do in names of variables, headers and URL parameters.
    """
    words = read_significant_words(name)
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if ambiguous and before and last in ("tokens", "keys"):
        last = last.removesuffix("s")
    elif last not in SECRET_WORDS and (joined := JOINED.fullmatch(last)):
        before, last = joined.groups()
    if before in COUNTED:
        return False
    return is_clearly_secret(name) or (
        last in SECRET_WORDS
        and not {before, before.removesuffix("s")} & HARMLESS.get(last, frozenset())
        and (ambiguous or before != "" or last not in AMBIGUOUS)
    )


def is_clearly_secret(name: str) -> bool:
    """Return whether a name cannot mean anything other than a secret: `db_password`, `api_key`, but not `user_token`."""
    return has_secret_ending(read_significant_words(name))


def has_secret_ending(words: list[str]) -> bool:
    return "".join(words).removesuffix("s").endswith(ENDINGS)


def read_significant_words(name: str) -> list[str]:
    """Return a name's words up to the one that may make it secret; [] for the name of a function in a file."""
    words = [] if ":" in name else split_words(name)
    while len(words) > 1 and (words[-1].isdecimal() or words[-1] in QUALIFIERS) and not has_secret_ending(words):
        words.pop()
    return words


def names_secret_variable(key: str) -> bool:
    """Return whether a key's value names an environment variable with a secret: `token_env`, `key_from_env`."""
    words = split_words(key)
    ends = [number for number, word in enumerate(words) if word in VARIABLE_WORDS]
    return bool(ends) and is_secret_name("_".join(["named", *words[: ends[0]]]).removesuffix("_from"))


def split_words(name: str) -> list[str]:
    return [word.lower() for word in WORD.findall(name)]
