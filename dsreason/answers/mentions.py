"""Parser that finds the chosen option in a response that gives the option's text instead of its letter.

A response that mentions an option's text does not necessarily choose the option: responses quote option texts, deny them, or
use them to describe something else, such as another car. An option therefore counts only if the last sentence has one of a few
forms: a subject, linking words, the option's text, and hardly anything else ("so the car should «turn left»", "it is «a dog»").
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from dsreason.answers.phrases import DENIAL, POSSIBLY, PROVISIONAL
from dsreason.answers.text import clean_text, take_text_before
from dsreason.text import normalize, normalize_option

PART = re.compile(r"[,;]|\bbut\b")
"""Pattern for the boundary between a denied part of a sentence and the part that corrects it."""
MARKED = re.compile("«(.+?)»")
"""Pattern for a mark that stands for an option's text."""
OR_BEFORE, OR_BEHIND = re.compile(r"\bor\s+(?:\w+\s+)?$"), re.compile(r"\s*or\b")
WINDOW = 50
"""Number of characters before and after an option's text that determine the text's role in the sentence."""
LONGEST = 300
"""Maximum number of characters in a sentence that can be an answer."""
SAID_OF = re.compile(
    r"\s+(?:is|are|was|were|can|could|would|has|have|seems?)\b(?!\s+(?:the|correct|right|most|what|visible|shown|seen|present"
    r"|used|held|being|likely|responsible|to\s+blame|at\s+fault)\b)"
)
"""Words after an option's text that start a statement about it."""
UNDONE = re.compile(
    r"\b(?:fail(?:s|ed|ing)?|refus\w+|avoid\w*|prevent\w*|neglect\w*|declin\w*|hesitat\w*|omit\w*|forg[eo]t\w*|pretend\w*"
    r"|almost|nearly|barely|hardly|(?:plan\w*|hop(?:es?|ed|ing)|tr(?:y|ies|ied|ying)|supposed)\s+to|want(?:s|ed|ing)?|intend\w*"
    r"|(?<!\bi\s)would)\b",
    re.IGNORECASE,
)
"""Words before an option's text, in the same clause, showing that an action did not happen or was only intended."""
LINK = (
    r"(?:and|or|but|to|at|in|on|of|for|from|by|with|without|before|behind|after|when|while|as|so|since|because|due|if|until|than"
    r"|that|which|who|is|are|was|were|has|it|he|she|they|there|here|now|then|ahead|again|too|also|one|first|next|only|instead|\w+wards?|\w+ly"
    r"|between|into|onto|under|over|near|inside|during|about|around|through|across|along|against|via|within|above|below)\b"
)
COMPOUND_BEFORE = re.compile(
    rf"\b(?:a|an|the|this|that|its|their)\s+(?!{LINK}|answer|option|choice|colou?r)[^\W\d]+\s+$"
)
COMPOUND_BEHIND = re.compile(rf"(?<!\d)\s+(?!{LINK})[^\W\d]")
"""Contexts in which a one-word option is part of a longer term, as in "the bus stop" and "stop line"."""
IS_BEFORE = re.compile(r"(?:\b(?:is|are|was|were)|['’]s)\s+(?:an?\s+)?$")
"""Context after which a one-word option may be followed by other words, as in "it is a red light"."""
DIRECTIONS = ("left", "right", "up", "down", "forward", "forwards", "backward", "backwards")
"""Direction words, which may follow a noun without forming a longer term, as in "it moves the cup left"."""

# ---------------------------------------------------------------- forms of an answer

SURELY = (
    r"(?:(?:(?:most|very)\s+)?(?:likely|probably|clearly|definitely|certainly|obviously|apparently|evidently|simply|indeed|really"
    r"|only|exactly|now|then|next|first|just)\s+)?"
)
ARTICLE = r"(?:(?:an?|the)\s+)?"
THINGS = (
    r"(?:the|this|that|these|those)\s+(?!other|another|second|third|last|first|next|previous|former|opposite|wrong|same|rest\b)"
    r"(?:[^\W\d][\w-]*\s+){1,2}?(?:(?:in|of)\s+(?:the|this)\s+(?:[^\W\d][\w-]*\s+){1,2}?)?"
)
"""Subjects of sentences that describe or identify something."""
AGENT = (
    r"(?:it|he|she|they|we|(?:the|this)\s+(?:(?:ego|own|host|autonomous|self-driving|robotic?|humanoid|right|left)\s+)?"
    r"(?:vehicle|car|driver|robot|arm|gripper|hand|person|man|woman|human|operator|worker|agent|object|cube|ball|camera))\s+"
)
"""Subjects of answers to questions about actions; "the other car" is not one of them."""
SUBJECT = (
    rf"(?:(?:it|this|that|these|those|there|he|she|they)\s*|{THINGS}"
    r"|its\s+(?:colou?r|shape|material|size|direction|state)\s+|the\s+number\s+of\s+(?:\w+\s+){1,2}?)"
)
SCENE = r"(?:video|clip|image|picture|photo|scene|footage|scenario|end|(?:last|final)\s+frame)"
OPINION = (
    r"(?:(?:i|we)\s*(?:would\s+|['’]d\s+|can\s+)?(?:think|believe|say|guess|conclude|assume|suspect|infer|reckon)\s+(?:that\s+)?"
    r"|it\s+(?:looks|seems)\s+like\s+)"
)
SO = r"(?:so(?!\s+(?:that|far|much|many|as|long)\b)|therefore|thus|hence|consequently)"
OPENING = (
    rf"(?:{OPINION}|(?:and\s+)?{SO},?\s+"
    r"|(?:overall|finally|clearly|(?:most\s+)?(?:likely|probably)|definitely|in\s+(?:conclusion|summary|short)|as\s+a\s+result"
    r"|next|then|here|rather|instead|actually|because\s+of|due\s+to|not\s+«[^»]+»,?\s+but),?\s+"
    rf"|(?:in|at|by|from)\s+(?:the|this)\s+{SCENE},?\s+"
    r"|(?:because|since|as|given|judging|based\s+on|looking\s+at|considering|due\s+to)\s[^,«»]+,\s+"
    rf"|[^,;«»]+,?\s+(?:and\s+)?{SO},?\s+)"
)
IS = (
    rf"{SURELY}(?:is|are|was|were|['’]s|['’]re|(?:must|has\s+to|seems?\s+to|appears?\s+to)\s+be|looks?(?:\s+like)?"
    rf"|seems?|appears?|remains?|(?:is|are)\s+made\s+of)\s*:?\s+{SURELY}{ARTICLE}"
)
LINKS = (
    rf"(?:{SUBJECT}{IS}"
    rf"|{AGENT}{SURELY}(?:will|should|must|shall|has\s+to|have\s+to|needs?\s+to|(?:is|are|am)\s+going\s+to|ought\s+to)\s+{SURELY}"
    rf"|{AGENT}{SURELY}(?:goes|moves|turns|heads|drives|travels|steers|rolls|points|rotates|(?:is|are)\s+(?:going|moving|turning|heading))"
    r"\s+(?:(?:(?:to|towards?)\s+)?(?:the\s+)?)?"
    rf"|{AGENT}{SURELY}(?:uses|used|(?:is|are|was)\s+using)\s+{ARTICLE}"
    r"|(?:the|its|his|her)\s+(?:only\s+)?(?:best|correct|right|next|safest|proper|appropriate)\s+(?:thing|action|step|move|manoeuvre|maneuver"
    r"|decision)\s+(?:to\s+do\s+|to\s+take\s+|here\s+|now\s+)?(?:is|would\s+be)\s+(?:to\s+)?"
    rf"|(?:i|we|you)\s+(?:can\s+)?(?:clearly\s+)?(?:see|count|counted|observe|spot)\s+{SURELY}{ARTICLE}"
    r"|(?:it|the\s+\w+)\s+(?:happen(?:s|ed)|occur(?:s|red)|took\s+place|takes\s+place|(?:is|was)\s+(?:filmed|recorded|caused))"
    rf"\s+(?:because(?:\s+of)?|due\s+to|by|at|in|on)\s+{ARTICLE}"
    rf"|(?:i|we)\s+(?:would\s+)?attribute\s+(?:it|this|the\s+\w+)\s+to\s+|{ARTICLE})"
)
"""Pattern for a subject and the words that connect it with the option."""
TAIL = (
    rf"(?:\s+(?:(?:in|of)\s+(?:the|this)\s+{SCENE}|at\s+the\s+(?:line|crossing|intersection|junction|light)|here|now|it\s+is)\b"
    r"|,?\s+i\s+(?:think|believe|guess))?"
    r"(?:(?:,\s*|\s+)(?:because|since|due\s+to|based\s+on|rather\s+than|instead\s+of|as\s+(?:the|it|its|there|this|a)|(?:and\s+)?not)\b.*)?[\s.!\"')]*"
)
ANSWERS = re.compile(rf"\W*(?:{OPENING}){{0,3}}{LINKS}«([^»]+)»{TAIL}")
COUNTS = re.compile(
    rf"\W*(?:{OPENING}){{0,2}}(?:there\s+(?:is|are|was|were)|(?:i|we|you)\s+(?:can\s+)?(?:see|count|counted|observe))\s+{SURELY}"
    rf"«([^»]+)»\s+(?!left|seconds?|minutes?|hours?|times|frames?|met(?:er|re)s?|options?|choices|answers|reasons|ways)[^\W\d]\w*{TAIL}"
)
"""Pattern for answers that state a count, such as `there are «C» cars`."""
NUMBER = re.compile(r"[\d.,]+|zero|one|two|three|four|five|six|seven|eight|nine|ten")
MEASURED = re.compile(rf"\b(?:the|this|that|these|those|its)\s+(?!number\b|count\b|total\b|sum\b|{SCENE})[^,]*$")
"""Contexts that precede a number other than the requested count, as in "the speed limit is «C»"."""
TALKED_ABOUT = re.compile(
    r"\b(?:ask(?:s|ed)?|instruct\w*|tells?|told|(?<!would\s)(?<!['’]d\s)says?|said|suggests?|announce\w*|claims?|expect\w*|include\w*|goal|task|plan|aim|rules?|question"
    r"|options?|choices?|forecast|thought|other|another|previous\w*|former|earlier|begins?|starts?|initial\w*|about\s+to|enough|too|usually"
    r"|normally|used\s+to|before|after|until|as\s+soon|decides?|signs?|below|listed|list)\b"
)
"""Words before an option's text, in the same sentence, that refer to somebody or something else, or to a different time."""


def is_denied(sentence: str) -> bool:
    return sentence.rstrip("\"')").endswith("?") or DENIAL.search(re.sub("«.+?»", "", sentence)) is not None


class OptionTexts:
    """A question's option texts, with methods that find the option to which a response refers."""

    def __init__(self, options: dict[str, str] | None) -> None:
        self.bare = {key: normalize_option(clean_text(text)) for key, text in (options or {}).items()}
        longest_first = sorted(self.bare.items(), key=lambda item: -len(item[1]))
        times = Counter(self.bare.values())
        self.phrases = {key: text for key, text in longest_first if times[text] == 1 and text not in ("", "yes", "no")}
        """Option key → text, longest first, for texts that can be recognised unambiguously in a sentence."""

    def find_key(self, text: str) -> str | None:
        """Return the key of the option whose text equals `text` after normalisation; None if no option or several match."""
        keys = (
            [key for key, option in self.bare.items() if option == normalize_option(text)]
            if text.strip(" .!;,")
            else []
        )
        return keys[0] if len(keys) == 1 else None

    def iter_others(self, key: str) -> Iterator[str]:
        return (option for other, option in self.bare.items() if other != key)

    def find_answered(self, sentences: Sequence[str], named: set[str]) -> str | None:
        """Return the option that the last sentence gives as the answer.

        Return None if another sentence affirms a different option or denies this one. If this option's letter is the only one in
        `named`, it is sufficient that any sentence affirms the option's text.
        """
        affirmed: dict[str, list[bool]] = {}
        marked = [self._mark_texts(normalize(sentence)) for sentence in sentences]
        for number, sentence in enumerate(marked):
            if sentence is None:
                return None
            for key, is_affirmed in self._iter_mentions(sentence, is_first=number == 0):
                affirmed.setdefault(key, []).append(is_affirmed)
        chosen_keys = [key for key, times in affirmed.items() if any(times)]
        if len(chosen_keys) != 1 or not all(affirmed[chosen_keys[0]]):
            return None
        [key] = chosen_keys
        if named:
            return key if named == {key} else None
        return key if key == _find_answer(marked[-1] or "", is_number=bool(NUMBER.fullmatch(self.bare[key]))) else None

    def _mark_texts(self, sentence: str) -> str | None:
        """Replace option texts with marks, longest first: `it is ice on the road` → `it is «B»`.

        Return None if the sentence may end in a truncated option text, or if an option is part of a longer term ("bus stop").
        """
        for key, phrase in self.phrases.items():
            match = re.search(rf"(?<![\w.$«-]){re.escape(phrase)}(?![\w%»]|[.,'’-]\w)", sentence)
            if match is None:
                continue
            end = sentence[match.start() :]
            if end != phrase and any(other.startswith(end) for other in self.iter_others(key)):
                return None
            if " " not in phrase and any(_is_part(word, sentence) for word in match.re.finditer(sentence)):
                return None
            sentence = match.re.sub(f"«{key}»".replace("\\", r"\\"), sentence)
        return sentence

    @staticmethod
    def _iter_mentions(marked: str, *, is_first: bool) -> Iterator[tuple[str, bool]]:
        """Yield the key of each option that a sentence mentions, and whether the clause affirms the option.

        A clause does not affirm an option if it denies it ("failed to «D»"), offers several options ("«A» or «B»"), or depends
        on an earlier "if".
        """
        is_open = marked.endswith("?")
        clauses = re.split(PART, marked)
        for number, (clause, following) in enumerate(zip(clauses, [*clauses[1:], ""], strict=True)):
            is_open = is_open or POSSIBLY.search(clause) is not None
            mentions = list(MARKED.finditer(clause))
            before_last = clause[: mentions[-1].start()] if mentions else ""
            is_refused = is_denied(clause) or UNDONE.search(before_last) is not None
            for mention in mentions:
                before = take_text_before(clause, mention.start(), WINDOW)
                after = clause[mention.end() : mention.end() + WINDOW]
                is_heading = after.startswith(":") and not (is_first and number == 0 and mention.start() == 0)
                is_offered = OR_BEFORE.search(before) or OR_BEHIND.match(after or following)
                yield mention[1], not (is_open or is_refused or is_heading or is_offered or SAID_OF.match(after))


def _find_answer(marked: str, *, is_number: bool) -> str | None:
    """Return the option that a sentence gives as the answer; None if the sentence does not have the form of an answer."""
    match = (ANSWERS.fullmatch(marked) or COUNTS.fullmatch(marked)) if len(marked) <= LONGEST else None
    if match is None:
        return None
    before = marked[: match.start(1) - 1]
    refusing = (TALKED_ABOUT, PROVISIONAL, *([MEASURED] if is_number else []))
    return None if any(pattern.search(before) for pattern in refusing) else match[1]


def _is_part(word: re.Match[str], sentence: str) -> bool:
    before = take_text_before(sentence, word.start(), WINDOW)
    is_last = word[0] not in DIRECTIONS and COMPOUND_BEFORE.search(before) is not None
    return is_last or (COMPOUND_BEHIND.match(sentence, word.end()) is not None and not IS_BEFORE.search(before))
