"""The rule that decides which names belong to secrets.

The same rule applies to configuration keys, options, HTTP headers, environment variables, URL parameters and JSON keys.
"""

from __future__ import annotations

import re
from functools import lru_cache


def read_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
"""Pattern of the single words in names such as `api_key`, `x-api-key`, `apiKey`, `APIKey` and `API_KEY2`."""
ENDINGS = (
    *("password", "passwd", "pwd", "passphrase", "passcode", "secret", "credential"),
    *("apikey", "authkey", "accesskey", "accesskeyid", "accountkey", "privatekey", "secretkey", "subscriptionkey"),
    *("authtoken", "accesstoken", "refreshtoken", "bearertoken", "sastoken", "hftoken", "apitoken", "authorization"),
    *("connectionstring", "connstring", "connstr", "sessionid", "sessionkey", "webhookurl"),
)
"""Suffixes of secret names, with or without word separators: `db_password`, `PGPASSWORD`, `Api-Key`, `clientsecret`."""
SECRET_WORDS = read_words(
    "token key pw pass auth oauth bearer cookie cookies session sas sig signature dsn jwt otp cred creds webhook"
)
"""Last words of secret names."""
COUNTED = read_words("per each max min num")
"""Words that make every name harmless if they precede the last word: `cost_per_token`."""
HARMLESS = {
    "token": read_words(
        "eos bos pad unk sep cls mask image video audio vision stop end start begin next first last special turn think "
        "box new input output decoder encoder prompt padding"
    ),
    "key": read_words(
        "score data row field column image video media audio clip text prompt question answer response completion message "
        "messages label id index sort group cache primary foreign partition metric meta dict json config state parameter "
        "weight tensor layer registry reward class caption path file name item time step map"
    )
    | {""},
    "pass": read_words("forward backward single multi first second one two full must low high band by"),
}
"""Words that make `token` and similar last words harmless: `eos_token`, `score_key`. A plain `key` is also harmless."""
QUALIFIERS = read_words(
    "value val plain base prod production dev staging test read write ro rw primary secondary backup old new default hash "
    "header headers"
)
"""Words that may follow the word that makes a name secret: `HF_TOKEN_READ`, `API_KEY_2`, `password_base64`."""
VARIABLE_WORDS = read_words("env environment variable var")
"""Last words of keys whose value names an environment variable with a secret: `token_env`, `api_key_variable`."""


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a name belongs to a secret: `hf_token`, `X-Api-Key` or `dbPassword`, but not `max_tokens` or `author`.

    The name of a function in a file, such as `judge.py:token`, is not secret.
    """
    words = [] if ":" in name else split_words(name)
    while len(words) > 1 and (words[-1].isdecimal() or words[-1] in QUALIFIERS):
        words.pop()
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if before in COUNTED:
        return False
    return "".join(words).removesuffix("s").endswith(ENDINGS) or (
        last in SECRET_WORDS and before not in HARMLESS.get(last, ())
    )


def names_secret_variable(key: str) -> bool:
    """Return whether a key's value names an environment variable with a secret: `token_env`, `key_from_env`."""
    words = split_words(key)
    ends = [number for number, word in enumerate(words) if word in VARIABLE_WORDS]
    return bool(ends) and is_secret_name("_".join(["named", *words[: ends[0]]]).removesuffix("_from"))


def split_words(name: str) -> list[str]:
    return [word.lower() for word in WORD.findall(name)]
