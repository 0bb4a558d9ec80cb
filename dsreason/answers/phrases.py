"""Patterns for the words around an answer that show whether it is chosen, rejected or only mentioned.

The patterns up to `ECHO` apply to all kinds of answers, the remaining ones only to options.
"""

from __future__ import annotations

import re

VERDICT = re.compile(
    r"""(?:\b(?:answer|option|choice)["']?(?:\s+(?:to|for)\s[^.,:;\n]{1,40}?|\s*\([^()\n]{1,40}[/,|][^()\n]{1,40}\))?"""
    r"""\s*(?:\b(?:is|(?:would|should|must)\s+be)\b(?:\s+(?:most\s+)?\w+ly\b)?|[:=–-])"""
    r"""|\b(?:answer|choose|pick|select|go(?:ing)?\s+with)\b)\s*:?\s*""",
    re.IGNORECASE,
)
"""Pattern for the start of a verdict, after which the answer follows."""
DOUBT = r"(?<!no\s)(?<!without\sa\s)(?<!without\sany\s)doubt"
OTHERS_SAY = r"(?:you|one|some|many|people|others)\s+(?:might|may|could|would)"
REFUSAL = re.compile(
    rf"\b(?:not|never|nor|neither|or|if|whether|unless|{DOUBT}|cannot|wrong|incorrect|false|worst|least|unlikely|odd|would\s+have"
    rf"|exclude[ds]?|eliminate[ds]?|reject(?:s|ed)?|dismiss(?:es|ed)?|discard(?:s|ed)?|avoid(?:s|ed)?"
    rf"|{OTHERS_SAY})\b|n['’]t\b|\brule[sd]?\s+out\b|\b(?:second|third|next|other|another|previous)\s+(?:\w+\s+(?:is\s+)?)?$",
    re.IGNORECASE,
)
"""Words that negate a verdict if they precede it in the same clause."""
PROVISIONAL = re.compile(
    r"^\W*at\s+first\b|\b(?:at\s+first\s+(?:glance|sight)|first\s+(?:thought|guess|impression)|initially|originally"
    r"|(?:if|unless)(?!\s+(?:i|we|you)\s+(?:had|have|must|were|am|look|watch|see|compare)\b)"
    r"|(?:user|you|someone|they|he|she|people|students?|friend)\s+(?:thinks?|thought|says?|said|claim(?:s|ed)?|believed?s?"
    r"|suggest(?:s|ed)?|cho[os]ses?))\b",
    re.IGNORECASE,
)
"""Words before a verdict, in the same sentence, that limit it to a first impression, somebody else's opinion, or a condition."""
SECOND_THOUGHT = re.compile(
    r"\b(?:wait|actually|correction|sorry|second\s+thoughts?|on\s+reflection|look(?:ing)?\s+again|chang\w+\s+my\s+(?:mind|answer))\b"
    r"|(?:^|[.!])\W{0,5}(?:no(?!\s+doubt)|hmm)\b|,\s*no\s*[,;.–—-]",
    re.IGNORECASE,
)
"""Words after an apparent answer that may announce a change of mind."""
DENIAL = re.compile(
    rf"\b(?:not?(?!\s+doubt)|{OTHERS_SAY}|never|nor|neither|none|wrong|incorrect|false|except|unlike|unlikely|cannot|if|whether|unless|instead"
    rf"|rather|either|{DOUBT}|eliminat\w*|exclud\w*|rul\w+\s+out|disagree|against|reject\w*|dismiss\w*|discard\w*"
    r"|contradict\w*|possib\w+|worst|odd|would\s+have|less|least|anything|everything|nicht|kein\w*|pas|не|нет)\b|n['’]t\b|[不没沒非無]|ない|아니",
    re.IGNORECASE,
)
"""Negations in a text without a verdict; the text may argue against the option that it names."""
LEADS = (
    r"(?:\b(?:is|was|be|been|means|suggests?|indicates?|leaves?|leaving|makes?|making|supports?|favou?rs?|match(?:es)?"
    r"|implies|remains?|its|think|believe|guess|suppose|say|assume|suspect|conclude|reckon|(?:i|we)\s+consider"
    r"|(?:leaves?|left|ends?\s+up|ended\s+up)\s+(?:\w+\s+)?with|looks?\s+like"
    r"|cho(?:se|sen|osing)|pick(?:ed|ing)|select(?:ed|ing)|bet(?:ting)?\s+on|vote\s+goes\s+to|(?:we|i)\s+get|gives|yields"
    r"|(?:corresponds?|points?|leads?|down|amounts?|leaning|lean|pointing)\s+to(?:wards?)?"
    r"|(?:vote|opt|settle|stick|stay|go)\s+(?:for|on|with)"
    r"|so|therefore|thus|thereby|hence|consequently|accordingly|overall|finally|ultimately|rather|as\s+such|caused\s+by"
    r"|(?:no|without\s+(?:a|any))\s+doubt"
    r"|in\s+(?:conclusion|summary|short|total|my\s+(?:opinion|view))|to\s+(?:sum\s+up|conclude)|as\s+a\s+result"
    r"|conclusion|result|verdict|prediction|decision|guess|(?:ans|sol)\.?(?!\w)|solution|response|output|final|correct|namely"
    r"|sure|certainly|absolutely|clearly|obviously|probably|possibly|perhaps|maybe|likely|definitely|yes|okay|ok)\b"
    r"|,\s+but\b|\bnot\s[^.,;:\n]{1,30}\sbut\b|['’]s\b|\bi\.e\.|[=-]>|[→⇒∴=])"
)
"""Words that affirm the answer directly after them, at the end of a clause."""

YES_NO = re.compile(
    r"[\W_]*(yes|no|true|false|(?:definitely|certainly|absolutely|surely|probably)\s+not)"
    r"(?=\s*(?:$|[,;:!)\]}\"']|\.(?!\s*\d)|[–—-](?!\s*(?:yes|no)\b))"
    r"|\s+(?:it|there|the|this|that|they|he|she|you|we|because|since|as)\b)",
    re.IGNORECASE,
)
"""Pattern for an unqualified yes or no (or a synonym) at the start of a text; excludes "no one", "yes or no" and "No. 3"."""
LED_YES_NO = re.compile(
    rf"(?:{LEADS}[ \t,:–-]*(?<!yes-)(yes|no)(?=\s*(?:$|[.,;!\n]))|,\s+(yes|no)[.!]?$"
    r"|\b(?:statement|claim|answer|this|that|it)(?:\s+is|['’]s)\s+(true|false)(?=\s*(?:$|[.,;!\n])))",
    re.IGNORECASE,
)
"""Pattern for conclusions such as `So no`, `I think yes` and `the statement is false`."""
CHANGED_MIND = re.compile(
    r"(?:^|[^\w\s])\s*wait\b|\b(?:(?:(?<!no\s)correction|sorry(?!\s+(?:for|about|if|to)))(?=\W*\w)|second\s+thoughts?"
    r"|on\s+reflection|actually(?=.{0,100}\b(?:yes|no|not)\b))\b",
    re.IGNORECASE,
)
"""Pattern for a change of mind, after which only the later text counts; it does not match "it has to wait"."""
ECHO = re.compile(r"[\[(]\s*yes\s*/\s*no\s*[\])]", re.IGNORECASE)
"""Pattern for the question's answer choices, which a response may repeat."""

BEING = r"(?:is|was|seems|looks|appears|must\s+have\s+been|(?:would|should|must|has\s+to)\s+be)\s+(?:to\s+be\s+)?(?:\w+ly\s+)?"
FITTING = r"(?:likely|plausible|probable|appropriate|accurate|suitable|fitting|reasonable|logical|consistent|sensible)"
IS_CORRECT = (
    rf"(?:{BEING}(?:correct|right\b(?!\s+(?:next|behind|in|at|of|beside))"
    r"|(?:(?:the|my)\s+)?(?:correct|right|best|better|final|only\s+(?:correct|possible|remaining)|most\s+\w+)"
    r"\s+(?:answer|option|choice|one|description|match|action|guess|explanation)"
    rf"|the\s+(?:best|most\s+{FITTING})|(?:the|my)\s+(?:answer|choice|guess|pick))\b"
    r"|it\s+is(?=\s*(?:$|[.!\n])))(?!\s*(?:\?|,?\s*(?:if|when|only|unless|provided|assuming|except|were|had)\b))"
)
"""Words after a letter that choose the letter's option unconditionally."""
ASIDE = (
    r"[,;]?\s+(?:because|since|as(?!\s+(?:well|long|soon|far|if))|rather\s+than|instead\s+of|based\s+on|due\s+to|over|unlike|while|whereas"
    r"|and\s+the\s+reason|(?:even\s+|al)?though)\b"
)
"""Words that start a reason or a rejected alternative."""
DOUBTFUL = (
    r"(?:\b(?:not?|nothing|none|never|nor|neither|wrong|incorrect|false|exclu\w*|eliminat\w*|reject\w*|dismiss\w*|avoid\w*"
    r"|poor\w*|bad\w*|un(?!der|it|ion)\w+|im\w+able|only(?!\s+(?:option|choice|answer|one)\b)|except|but|yet|though|however|if|when"
    r"|unless|whether|hardly|barely|scarcely|part(?:ly|ially)?|some\w*|least|less|worse|worst|open|doubtful|question\w*|out|else"
    r"|as\s+(?:long|soon|far)|many|others?|people|nobody|everyone|(?<!\bi\s)would)\b|n['’]t\b|\?)"
)
"""Words that retract or weaken a statement about an option."""
FITS_END = (
    r"(?=\s*(?:$|[\n.,;!)\]:–—-])|\s+(?:because|since|as\s+(?:the|it|its|there|this)|here|to\s+me|for\s+me|given|with"
    r"|(?:in|for)\s+(?:the|this))\b)"
)
FITS_WHAT = r"\s+(?:the|this|these|those|that|what|all|it|its|best|better|well|most|more|perfectly|exactly|closely)\b"
FITS = (
    rf"(?:{BEING}(?:(?:better|left|preferable|true|likely|(?:better\s+)?supported|(?:the\s+)?(?:closest|best|likeliest)"
    rf"|(?:the\s+)?(?:more|most)\s+{FITTING})"
    r"(?:\s+(?:to\s+be\s+)?(?:the\s+)?(?:correct|right|best|true)(?:\s+(?:option|choice|answer|one))?|\s+by\s+the\s+\w+)?"
    rf"{FITS_END}"
    r"|what\b|the\s+(?:one|cause|reason)\b"
    r"|the\s+only\s+(?:option|choice|answer|one)\s+(?:left|remaining|that\s+(?:fits|matches|remains|makes\s+sense))\b)"
    r"|(?:remains|makes\s+(?:more\s+|(?:the\s+)?most\s+)?sense|works\s+best)\b"
    rf"{FITS_END}"
    rf"|(?:best\s+)?(?:fits|matches|describes|applies)\b(?:{FITS_WHAT}|\s+to\s+(?:the|this|what)\b|{FITS_END}))"
    rf"(?!(?:(?!{ASIDE})[^.!?\n]){{0,200}}?{DOUBTFUL})"
)
"""Statements after a letter that usually refer only to the chosen option."""
JUDGEMENT = (
    r"[)\].:?]*\s*[:=–—-]?\s+(?i:(?:is\s+)?(?:(yes|correct|right|true)|(no|incorrect|wrong|false|not\s+correct)))"
    r"(?=\s*(?:$|[.,;!\n)]))"
)
"""Pattern for a judgement (right or wrong) after a letter, for texts that judge each option."""
REASON = re.compile(rf"{ASIDE}.*|[,;]?\s+not\b.*", re.IGNORECASE)
"""Pattern for a reason or rejected alternative after a choice, as in "B because A is too slow" and "B, not A"."""
PREDICATE = re.compile(r"(?:is|are|was|were|would|can|could|cannot|seems?|does|has|makes|and|or|nor)\b|\w+n['’]t\b")
"""Words after `(A)` that start a statement about option A without choosing the option."""
REJECTED = re.compile(
    r"(?:is\s+)?(?:wrong|incorrect|false|unlikely|excluded|ruled\s+out|eliminated|impossible|no(?=\s*[.,;:!-]|\s*$)"
    r"|not\s+(?:correct|right|likely|possible|the|this|visible|shown|applicable))\b",
    re.IGNORECASE,
)
"""Words after `A:` that reject option A."""

POSSIBLY = re.compile(
    r"\b(?:if(?!\s+(?:i|we)\s+(?:had|have|must|were|am)\b)|whether|unless|(?<!i\s)(?:suppose|supposing|assume|assuming|imagine))\b"
    r"|\b(?:could|may|might|would\s+need)\b[^,;]*$",
    re.IGNORECASE,
)
"""Words before a letter, in the same sentence, showing that the option is not yet the conclusion."""
HEDGE = re.compile(r"maybe|perhaps|possibly", re.IGNORECASE)
"""Pattern for hedges. An option after a hedge counts only if the sentence names no other option."""
SUPPORTED = (
    r"(?:shows|seems|looks|appears|best|alone|(?:most\s+)?likely|for\s+sure|of\s+course"
    r"|(?:obvious|definite|clear|probab|certain)ly)"
)
"""Words that affirm an option if they follow the only letter in a text."""
ARTICLES = r"la|el|die|der|das|le|est|es|ist|è|é|opci[oó]n|opzione|opção|with|like|do"
"""Words that may precede an option's letter if it is the only letter in a text."""

MENTION = (
    r"(?:look(?:ing)?\s+at|(?:consider|check|evaluat|examin|discuss)(?:e|ing)?|regarding|as\s+for|about"
    r"|compared\s+(?:to|with)|(?:grade|type|class|level|vitamin|plan)\s*:?)\s+"
)
"""Words before a letter that is only mentioned, or that stands for a grade or type instead of an option."""
