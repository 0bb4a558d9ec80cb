"""Reading which option a text names: careful rather than clever, since a wrong guess is worse than none.

The rules, in this order: `boxed`, `only letter`, `option text`, `answer is` (a verdict such as "the answer is B"),
`own line`, `letter and text`, `only option named`. Two options named without a verdict are no answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsreason.answers.text import last_boxed, normalized, without_markup

UNREAD = ("", "none")
"""No answer, and the rule that says so."""

VERDICT = re.compile(
    r"""(?:\b(?:answer|option|choice)["']?(?:\s+(?:to|for)\s[^.,:;\n]{1,40}?)?"""
    r"""\s*(?:\b(?:is|(?:would|should|must)\s+be)\b(?:\s+(?:most\s+)?\w+ly\b)?|[:=–-])"""
    r"""|\b(?:answer|choose|pick|select|go(?:ing)?\s+with)\b)\s*:?\s*""",
    re.IGNORECASE,
)
"""Begins a verdict; what is chosen follows."""
IS_CORRECT = (
    r"is\s+(?:correct|(?:the\s+)?(?:correct|right|best)\s+(?:answer|option|choice|one)|the\s+answer)\b(?!\s*\?)"
)
REFUSAL = re.compile(r"\b(?:not|never|nor|neither|or|if|whether|unless)\b|n['’]t\b", re.IGNORECASE)
"""In the clause before a verdict: it is none."""
REASON = re.compile(
    r"[,;]?\s+(?:because|since|as(?!\s+well)|not|rather\s+than|instead\s+of|based\s+on|due\s+to)\b.*", re.I
)
"""Ends what is chosen: "B because A is too slow"."""
SECOND_THOUGHT = re.compile(r"\b(?:wait|actually|correction|sorry)\b|(?:^|[.!?])\W{0,5}(?:no|hmm)\b", re.IGNORECASE)
"""Behind what looked like the answer: it may not be."""
DENIAL = re.compile(
    r"\b(?:not?|never|nor|neither|wrong|incorrect|false|except|unlike|cannot|if|whether|unless|instead|rather"
    r"|eliminat\w*|exclud\w*|rul\w+\s+out)\b|n['’]t\b",
    re.IGNORECASE,
)
"""In a text without a verdict: the option it names may be the one it is against."""
PREDICATE = re.compile(r"(?:is|are|was|were|would|can|could|cannot|seems?|does|has|makes|and|or|nor)\b|\w+n['’]t\b")
"""Behind `(A)`: something is said about the option, which is not to choose it."""

BEFORE_LETTER = r"""(?:(?:option|choice|letter)\s*:?\s*)?[(\[{"'\s]*"""
AFTER_LETTER = r"""[)\]}"'.:,;!\s]*"""
MARK = r"""(\s*[)\]}]+[.:,]?|[.:,;!](?=\s)|[.:](?=[^\W\d]{2})|\s+[-–—]+(?=\s))?\s*"""
"""Sets a letter off from the words behind it: `A)`, `A.`, `A:`, `A -`."""


def read_option(text: str, options: dict[str, str] | None = None) -> tuple[str, str]:
    """(key of the option that the text names, the rule that found it); `("", "none")` when no single one is named.

    Without `options` a single letter of A to Z counts, and no option's text can be recognised.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        key, _ = read_option(boxed, options)
        return (key, "boxed") if key else UNREAD
    reader = _Reader(options)
    cleaned = re.sub("(?m)^(?:[-•#>]+ )+", "", without_markup(text))
    for rule, find in (
        ("only letter", reader.only_letter),
        ("option text", reader.option_text),
        ("answer is", reader.verdict),
        ("letter and text", reader.chosen),
        ("own line", reader.own_line),
        ("letter and text", reader.letter_and_text),
        ("only option named", reader.only_one_named),
    ):
        found = find(cleaned)
        if found is not None:
            return found, rule
    return UNREAD


def option_with_text(text: str, options: dict[str, str] | None) -> str | None:
    """The letter of the one option with this text, case and final punctuation aside."""
    found = [letter.upper() for letter, option in (options or {}).items() if _bare(option) == _bare(text)]
    return found[0] if len(found) == 1 else None


def _bare(text: str) -> str:
    return normalized(text).rstrip(" .!;,")


def verdicts(text: str, begins: re.Pattern[str] = VERDICT) -> Iterator[tuple[int, str]]:
    """Where each verdict begins, and the rest of its line (as far as it matters); not those that their clause takes back."""
    for match in begins.finditer(text):
        if not is_refused(text[: match.start()]):
            yield match.start(), text[match.end() :][:500].partition("\n")[0]


def is_refused(before: str) -> bool:
    """Whether the clause that leads to a verdict takes it back: "I do not think that", "if"."""
    clause = re.split(r"[.,;:!?\n]|\b(?:so|therefore|thus|hence|but|because)\b", before[-200:])[-1]
    return REFUSAL.search(clause) is not None


class _Reader:
    """The rules. Each takes a text and gives an option's key, or None."""

    def __init__(self, options: dict[str, str] | None) -> None:
        self.keys = {key.upper(): key for key in options or "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
        self.letter = "|".join(re.escape(key) for key in self.keys)
        self.texts = {key: without_markup(text) for key, text in (options or {}).items()}

    def _key(self, letter: str) -> str | None:
        return self.keys.get(letter.upper())  # a Turkish İ matches I, and is none

    def only_letter(self, text: str) -> str | None:
        found = re.fullmatch(rf"{BEFORE_LETTER}({self.letter}){AFTER_LETTER}", text, re.IGNORECASE)
        return self._key(found[1]) if found else None

    def option_text(self, text: str) -> str | None:
        letter = option_with_text(text, self.texts) if text.strip(" .!;,") else None
        return self._key(letter) if letter else None

    def verdict(self, text: str) -> str | None:
        """The last one: a text that corrects itself ends with what it means."""
        correct = re.compile(rf"(?i:\boption\s+)?\(?(?<!\w)({self.letter})\)?\s+(?i:{IS_CORRECT})")
        found = [(start, self._said(line)) for start, line in verdicts(text)]
        found += [(m.start(), self.keys[m[1]]) for m in correct.finditer(text) if not is_refused(text[: m.start()])]
        keys = [key for _, key in sorted(found, key=lambda place: place[0]) if key]
        return keys[-1] if keys else None

    def chosen(self, line: str) -> str | None:
        """A letter, an option's text, or both of the same option; nothing else but a reason."""
        if "\n" in line:
            return None
        reason = REASON.search(line)
        clause = line[: reason.start()] if reason and not SECOND_THOUGHT.search(line[reason.start() :]) else ""
        for text in (line.strip(), clause if clause != "a" else ""):  # "a not so slow car" names no letter
            key = self.only_letter(text) or self.option_text(text)
            if key is not None:
                return key
            letter, _, rest = self._split(text)
            if letter is not None and self.option_text(rest) == letter:
                return letter
        return None

    def own_line(self, text: str) -> str | None:
        """The one option that has a line to itself."""
        chosen = {line: self.chosen(line) for line in text.splitlines()}
        keys = set(chosen.values()) - {None}
        others = [line for line, key in chosen.items() if key is None]
        if len(keys) != 1 or any(SECOND_THOUGHT.search(line) or self._contradicts(line) for line in others):
            return None
        return keys.pop()

    def letter_and_text(self, text: str) -> str | None:
        """`C. move left`: a letter that is set off, then words about what it stands for and no other option."""
        letter, mark, rest = self._split(text)
        if letter is None or not mark or self._contradicts(text) or self._named(rest) - {letter}:
            return None
        return None if mark[0] not in ".:" and PREDICATE.match(rest) else letter

    def only_one_named(self, text: str) -> str | None:
        """`(C)` or `option C` somewhere, and nothing that denies it or names another."""
        marked = self._marked(text)
        return marked.pop() if len(marked) == 1 and self._named(text) == marked and not DENIAL.search(text) else None

    def _said(self, line: str) -> str | None:
        sentence = re.split(r"(?<=[.!?;])\s", line)[0]
        if self._contradicts(line):
            return None
        return self.chosen(line) or self.chosen(sentence) or self.letter_and_text(REASON.sub("", sentence))

    def _contradicts(self, line: str) -> bool:
        """A letter with another option's text."""
        letter, mark, rest = self._split(line)
        return mark != "" and self.option_text(rest.partition("\n")[0]) not in (None, letter)

    def _split(self, text: str) -> tuple[str | None, str, str]:
        """(the letter that a text begins with, the mark that sets it off, what follows)."""
        found = re.match(rf"{BEFORE_LETTER}({self.letter})(?![\w'’]){MARK}", text, re.IGNORECASE)
        return (self._key(found[1]), (found[2] or "").strip(), text[found.end() :]) if found else (None, "", "")

    def _marked(self, text: str) -> set[str]:
        marks = rf"(?<!\w)[(\[]({self.letter})[)\]]|\b(?:option|choice)\s+({self.letter})\b"
        return {key for pair in re.findall(marks, text, re.IGNORECASE) if (key := self._key("".join(pair)))}

    def _named(self, text: str) -> set[str]:
        """All options that the text may mean, bare capitals included; not the "A" and "I" of ordinary sentences."""
        article = r"(?:^|(?<=\n)|(?<=[.!?:] ))A (?!(?:is|are|was|and|or|has|does|would|seems)\b)(?=[a-z])"
        words = re.sub(rf"{article}|\bI\b", "", text)
        bare = re.findall(rf"(?<![\w'’-])({self.letter})(?![\w'’-])", words)
        return self._marked(text) | {self.keys[letter] for letter in bare}
