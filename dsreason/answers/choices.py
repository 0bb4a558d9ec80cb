"""Parser that finds the option chosen in a response. It is cautious, because a wrong guess is worse than no answer.

The rules, in order: `boxed`, `only letter`, `option text`, `answer is` (a verdict such as "the answer is B"), `yes or no` (if
the options are yes and no), `own line`, `conclusion` ("I think B", "therefore, B"), `only one right` ("A: no. B: yes."),
`letter and text`, `only option named`, `option text named`. The parser returns no answer if the rules from `own line` to
`letter and text` disagree, if a different option follows a verdict, or if two options are named without a verdict.
"""

from __future__ import annotations

import re

from dsreason.answers.mentions import OptionTexts, is_denied
from dsreason.answers.phrases import (
    ARTICLES,
    ASIDE,
    FITS,
    HEDGE,
    IS_CORRECT,
    JUDGEMENT,
    LEADS,
    MENTION,
    POSSIBLY,
    PREDICATE,
    PROVISIONAL,
    REASON,
    REJECTED,
    SECOND_THOUGHT,
    SUPPORTED,
)
from dsreason.answers.text import EAST_ASIAN, clean_text, find_last_boxed, split_sentences, take_text_before
from dsreason.answers.verdicts import UNREAD, is_refused, iter_verdicts, read_yes_no
from dsreason.text import normalize

NEXT_FIELD = re.compile(r"""["']\s*,\s*["']\w+["']\s*:""")
"""Pattern for the start of the next key in a JSON object."""
WINDOW = 500
"""Number of characters before and after a letter to search for words about the letter's option."""
BEFORE_LETTER = r"""(?:(?:option|choice|letter)\s*:?\s*)?[(\[{"'\s]*"""
AFTER_LETTER = r"""[)\]}"'.:,;!\s]*"""
MARK = r"""(["']?\s*[)\]}]+[.:,]?|["']?[.,;:!](?=\s)|[.:](?=[^\W\d]{2})|\s+[-–—]+(?=\s))?\s*"""
"""Pattern for punctuation between a letter and the words that follow: `A)`, `A.`, `A:`, `A -`."""


def read_option(text: str, options: dict[str, str] | None = None) -> tuple[str, str]:
    """Return the key of the option that a text chooses and the rule that found it; `("", "none")` if no single option is found.

    If `options` is None, any single letter from A to Z counts, and option texts cannot be recognised.
    """
    boxed = find_last_boxed(text)
    if boxed is not None:
        key, _ = read_option(boxed, options)
        return (key, "boxed") if key else UNREAD
    reader = _Reader(options)
    plain = reader.remove_option_list(clean_text(text))
    for rule, find in (
        ("only letter", reader.read_only_letter),
        ("option text", reader.find_by_text),
        ("answer is", reader.find_verdict),
        ("yes or no", reader.find_yes_or_no),
        ("letter and text", reader.read_choice),
    ):
        key_or_unread = find(plain)
        if key_or_unread is not None:
            return (key_or_unread, rule) if key_or_unread else UNREAD
    key_by_rule = {
        rule: rule_key
        for rule, find in (
            ("own line", reader.find_own_line),
            ("conclusion", reader.find_conclusion),
            ("only one right", reader.find_only_right),
            ("letter and text", reader.read_letter_and_text),
        )
        if (rule_key := find(plain)) is not None
    }
    if key_by_rule:
        rule, key = next(iter(key_by_rule.items()))
        return (key, rule) if set(key_by_rule.values()) == {key} else UNREAD
    for rule, find in (("only option named", reader.find_only_named), ("option text named", reader.find_only_text)):
        named_key = find(plain)
        if named_key is not None:
            return named_key, rule
    return UNREAD


class _Reader:
    """Rules that find the option that a text chooses. Each rule takes a text and returns the key of an option, or None."""

    def __init__(self, options: dict[str, str] | None) -> None:
        self.keys = {key.upper(): key for key in options or "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
        self.order = list(self.keys.values())
        self.letter = "|".join(re.escape(key) for key in self.keys)
        self.texts = OptionTexts(options)
        self.led = re.compile(
            rf"""{LEADS}(?:[ \t,–-]*|\s*:\s*)(?:only\s+)?(?:the\s+)?(?:(?:correct|right)\s+)?"""
            r"""(?:(?:option|choice|letter|answer)\s+)?"""
            rf"""[(\["']*({self.letter})(?![\w'’-])["')\]]*(?=\s*(?:$|[\n.;:!(]|\s[-–—]\s)"""
            rf"""|\s*,(?!\s*(?:(?:and|or)\s+)?[(\[]?(?:{self.letter})\b)"""
            r"""|\s+(?:because|since|as|to\s+me|for\s+me|here|over|rather|instead|based|due|given|unlike|not|and\s+not"""
            r"""|with|than|correct|right|the\s+(?:most|best))\b)""",
            re.IGNORECASE,
        )
        subject = rf"(?i:\boption\s+)?\(?(?<!\w)({self.letter})\)?(?:\s+\([^()\n]*\))?\s+"
        self.correct = re.compile(rf"{subject}(?i:{IS_CORRECT})")
        self.fits = re.compile(rf"{subject}(?i:{FITS})")
        self.mentioned = re.compile(
            rf"(?i:{MENTION}(?:option\s+)?)[(\[]?({self.letter})\b|(?i:option\s+)({self.letter})\s+(?i:says|states|claims|mentions|asks|would)\b"
        )
        self.stands_alone = re.compile(
            rf"""(?:^|[,:;("'\[>=—–-]\s*|[{EAST_ASIAN}!]\s*|(?i:{LEADS}|\b(?:{ARTICLES}))\s+)({self.letter})(?![\w'’-])"""
            rf"""(?=\s*(?:$|[.,;!\]"'({EAST_ASIAN}]|[–—-]\s)|\s+(?:to\s+me|for\s+me|(?i:{SUPPORTED}))\b)"""
        )
        self.aside = re.compile(
            rf"(?:(?i:{ASIDE}).{{0,200}}?|(?i:[,;]?\s+\(?(?:and\s+)?not\s+(?:option\s+)?))[(\[]?(?<!\w)(?:{self.letter})(?!\w).*"
        )

    def to_key(self, letter: str) -> str | None:
        return self.keys.get(letter.upper())  # the pattern also matches a Turkish İ, which is not a key

    def remove_option_list(self, text: str) -> str:
        """Remove lines that only repeat the options, if at least two of these lines are consecutive and in order."""
        lines = text.splitlines()
        positions = [self._find_item_index(line) for line in lines]
        steps = [
            position is not None and following == position + 1
            for position, following in zip(positions, positions[1:], strict=False)
        ]
        listed = {i + j for i, is_step in enumerate(steps) if is_step for j in (0, 1)}
        return "\n".join(line for i, line in enumerate(lines) if i not in listed)

    def _find_item_index(self, line: str) -> int | None:
        """Return the index of the option whose letter and text make up the line (`B. to the right` → 1), or None."""
        letter, mark, remainder = self._split(line)
        return self.order.index(letter) if letter and mark and self.find_by_text(remainder) == letter else None

    # ------------------------------------------------------------ rules for the complete text

    def read_only_letter(self, text: str) -> str | None:
        match = re.fullmatch(rf"{BEFORE_LETTER}({self.letter}){AFTER_LETTER}", text, re.IGNORECASE)
        return self.to_key(match[1]) if match else None

    def find_by_text(self, text: str) -> str | None:
        return self.texts.find_key(text)

    def find_yes_or_no(self, text: str) -> str | None:
        """Return the option that corresponds to the text's yes or no; None unless the options include both yes and no."""
        by_text = {option: key for key, option in self.texts.bare.items()}
        if not {"yes", "no"} <= by_text.keys() or self._find_named_keys(text):
            return None
        return by_text.get(read_yes_no(text)[0])

    def read_choice(self, line: str) -> str | None:
        """Return the option that a line chooses by its letter, its text, or both, optionally followed by a reason."""
        if "\n" in line:
            return None
        reason = REASON.search(line)
        clause = line[: reason.start()] if reason and not SECOND_THOUGHT.search(line[reason.start() :]) else ""
        for text in (line.strip(), clause if clause != "a" else ""):  # "a not so slow car" does not name option A
            key = self.read_only_letter(text) or self.find_by_text(text)
            if key is not None:
                return key
            letter, _, remainder = self._split(text)
            if letter is not None and self.find_by_text(remainder) == letter:
                return letter
        return None

    # ------------------------------------------------------------ verdicts

    def find_verdict(self, text: str) -> str | None:
        """Return the option that the last verdict names; "" if a different option follows it; None if the text has no verdict.

        The last verdict counts, because a text that corrects itself ends with its final answer.
        """
        verdict_keys = [(start, self._read_verdict_line(line)) for start, line in iter_verdicts(text)]
        verdict_keys += [
            (m.start(), self.keys[m[1]]) for m in self.correct.finditer(text) if not is_refused(text, m.start())
        ]
        chosen_keys = [(start, key) for start, key in verdict_keys if key]
        if not chosen_keys:
            return None
        key = self._take_last_verdict(text, chosen_keys)
        later = split_sentences(text[max(chosen_keys)[0] :])[1:]
        return key if key and self.find_conclusion("\n".join(later)) in (None, key) else ""

    def find_conclusion(self, text: str) -> str | None:
        """Return the last option that is a clause's conclusion ("it should be B", "so B") or preference ("B fits")."""
        thought = SECOND_THOUGHT.search(text)
        for match in sorted([*self.led.finditer(text), *self.fits.finditer(text)], key=re.Match.end, reverse=True):
            key = self.to_key(match[1])
            if key is None or not self._is_concluded(text, match):
                continue
            if thought and thought.start() < match.start() and self._find_named_keys(text[: match.start(1)]):
                return None
            return self._take_last_verdict(text, [(match.end(), key)])
        return None

    def _is_concluded(self, text: str, match: re.Match[str]) -> bool:
        before = take_text_before(text, match.start(1), WINDOW)
        after = text[match.end(1) : match.end(1) + WINDOW]
        lead = take_text_before(text, match.start(), WINDOW)
        sentence, following = re.split(r"[.!?\n]", lead)[-1], re.split(r"(?<=[.!?])\s|\n", after)[0]
        joined = re.search(rf"(?<!\w)(?:{self.letter})[)\]]?,? (?:and|or) $", lead)
        if HEDGE.match(text, match.start()) and self._find_named_keys(sentence + following):
            return False
        if joined or is_refused(text, match.start(1)) or POSSIBLY.search(sentence) or following.endswith("?"):
            return False
        if match[1].islower() and (match[1] in "ai" or before.endswith("\n")):  # an article or an ordinary word
            return False
        if match[1] == "I" and not re.match(r"\W*(?:$|[\n.;:!])", after):
            return False
        return not self._has_other_text(match[1] + after)

    def _take_last_verdict(self, text: str, verdict_keys: list[tuple[int, str]]) -> str | None:
        """Return the last verdict's key; None if a second thought, a later line or the last sentence names a different option."""
        if not verdict_keys:
            return None
        start, key = max(verdict_keys, key=lambda verdict: verdict[0])
        thought = SECOND_THOUGHT.search(text, start)
        if thought and self._find_named_keys(text[thought.start() :]) - {key}:
            return None
        lines, sentences = text[start:].splitlines()[1:], split_sentences(text[start:])[1:]
        later = [*lines, *(line.rpartition(":")[2] for line in lines[-1:]), *sentences[-1:]]
        return key if {self.read_choice(line) for line in later} <= {None, key} else None

    def _read_verdict_line(self, line: str) -> str | None:
        line = NEXT_FIELD.split(line)[0]
        sentence = re.split(r"(?<=[.!?;])\s", line)[0]
        if self._has_other_text(line):
            return None
        return (
            self.read_choice(line)
            or self.read_choice(sentence)
            or self._read_letter_and_words(REASON.sub("", sentence))
        )

    # ------------------------------------------------------------ rules for the layout of a text

    def find_own_line(self, text: str) -> str | None:
        """Return the only option that stands alone on a line; None if no option or several options do."""
        key_of_line = {line: self.read_choice(line) for line in text.splitlines()}
        keys = set(key_of_line.values()) - {None}
        other_lines = [line for line, key in key_of_line.items() if key is None]
        if len(keys) != 1 or any(SECOND_THOUGHT.search(line) or self._has_other_text(line) for line in other_lines):
            return None
        return keys.pop()

    def read_letter_and_text(self, text: str) -> str | None:
        """Return the option in a text such as `C. move left`: a letter, a separator, and words that name no other option."""
        letter, mark, remainder = self._split(text)
        if letter is None or not mark or SECOND_THOUGHT.search(remainder) or mark[0] == ",":
            return self._read_letter_and_words(text)
        after = self.order[self.order.index(letter) + 1 :]
        items = re.findall(rf"(?:^|\s)[(\[]?({self.letter})[)\].:]+\s", remainder)
        is_list = bool(after and items) and items[0] == after[0].upper()
        joined = re.match(
            rf"(?:(?:and|or)\s+|[&/]\s*)?[(\[]?({self.letter})(?![\w'’-])", self._remove_articles(remainder)
        )
        is_another = any(self.read_choice(line) not in (None, letter) for line in remainder.splitlines())
        if is_list or joined or is_another or self._has_other_text(text):
            return None
        return None if self._is_remark(mark, remainder) else letter

    def _read_letter_and_words(self, text: str) -> str | None:
        """Return the option whose letter and a separator start the text, if the words after them refer to no other option."""
        letter, mark, remainder = self._split(text)
        if letter is None or not mark or self._has_other_text(text) or self._find_named_keys(remainder) - {letter}:
            return None
        return None if self._is_remark(mark, remainder) else letter

    def _is_remark(self, mark: str, remainder: str) -> bool:
        return REJECTED.match(remainder) is not None or (mark[0] not in ".:" and PREDICATE.match(remainder) is not None)

    def find_only_right(self, text: str) -> str | None:
        """Return the only option that the text calls right, if it calls others wrong, as in `A: no. B: yes. C: no.`"""
        if set(self.texts.bare.values()) & {"yes", "no", "true", "false", "right"}:
            return None
        letters = re.findall(rf"(?<![\w'’-])({self.letter}){JUDGEMENT}", text)
        right, wrong = ({letter for letter, *words in letters if words[i]} for i in (0, 1))
        return self.keys[right.pop()] if len(right) == 1 and wrong and not right & wrong else None

    # ------------------------------------------------------------ rules for texts that name only one option

    def find_only_named(self, text: str) -> str | None:
        """Return the only option that the text names, as `(C)`, `option C` or a bare C, and does not reject."""
        sentences = [
            self.aside.sub("?" if sentence.endswith("?") else "", sentence) for sentence in split_sentences(text)
        ]
        named_keys = set().union(*map(self._find_named_keys, sentences))
        if len(named_keys) != 1 or SECOND_THOUGHT.search(text) or self._is_contradictory(text):
            return None
        [key] = named_keys
        naming = [sentence for sentence in sentences if self._find_named_keys(sentence)]
        if any(is_denied(sentence) or PROVISIONAL.search(sentence) for sentence in naming) or self._is_taken_back(
            sentences
        ):
            return None
        naming = [self.mentioned.sub("", sentence) for sentence in naming]
        return (
            key
            if any(self._find_marked_keys(sentence) or self.stands_alone.search(sentence) for sentence in naming)
            else None
        )

    def find_only_text(self, text: str) -> str | None:
        """Return the option that the response gives as its answer by quoting the option's text; see the module `mentions`."""
        sentences = split_sentences(text)
        key = self.texts.find_answered(sentences, self._find_named_keys(text))
        if SECOND_THOUGHT.search(text) or self._is_taken_back(sentences) or self.mentioned.search(text):
            return None
        return key

    def _is_taken_back(self, sentences: list[str]) -> bool:
        """Return whether a later sentence retracts the answer, as in `Option A. That is wrong.`"""
        short = [sentence for sentence in sentences[1:] if len(sentence.split()) < 6]
        return any(
            re.match(r"(?i:it|that|this|which)(?:['’]s| is| was| seems)\b", sentence) and is_denied(sentence)
            for sentence in short
        )

    # ------------------------------------------------------------ helpers for letters in a text

    def _has_other_text(self, line: str) -> bool:
        """Return whether the line starts with a letter followed by the text of a different option."""
        letter, mark, remainder = self._split(line)
        return mark != "" and self.find_by_text(remainder.partition("\n")[0]) not in (None, letter)

    def _is_contradictory(self, text: str) -> bool:
        """Return whether a letter is next to a different option's text.

        Examples where A is `to the left`: `A. to the right` and `to the right (A)`.
        """
        for match in re.finditer(rf"(?<![\w'’-])({self.letter})(?![\w'’-])", text):
            before = take_text_before(text, match.start(), WINDOW)
            before_text = normalize(before).rstrip(" ([")
            other_texts = self.texts.iter_others(self.keys[match[1]])
            is_other = before.endswith("(") and any(before_text.endswith(other) for other in other_texts if other)
            if is_other or self._has_other_text(text[match.start() : match.start() + WINDOW]):
                return True
        return False

    def _split(self, text: str) -> tuple[str | None, str, str]:
        """Split a text into its leading option letter, the separator after it, and the remaining text.

        Return (None, "", "") if the text does not start with an option letter.
        """
        match = re.match(rf"{BEFORE_LETTER}({self.letter})(?![\w'’]){MARK}", text, re.IGNORECASE)
        return (self.to_key(match[1]), (match[2] or "").strip(), text[match.end() :]) if match else (None, "", "")

    def _find_marked_keys(self, text: str) -> set[str]:
        marks = rf"(?<!\w)[(\[]({self.letter})[)\]]|\b(?:option|choice)\s+({self.letter})\b"
        return {key for pair in re.findall(marks, text, re.IGNORECASE) if (key := self.to_key("".join(pair)))}

    def _find_named_keys(self, text: str) -> set[str]:
        """Return all options that the text may name, even by a bare capital letter, but not by the words "A" and "I"."""
        words = re.sub(r"\bI\b", "", self._remove_articles(text))
        bare = re.findall(rf"(?<![\w'’-])({self.letter})(?![\w'’-])", words)
        return self._find_marked_keys(text) | {self.keys[letter] for letter in bare}

    def _remove_articles(self, text: str) -> str:
        return re.sub(
            r"(?:^|(?<=\n)|(?<=[.!?:] ))A (?!(?:is|are|was|and|or|has|does|would|seems|fits|matches)\b)(?=[a-z])",
            "",
            text,
        )
