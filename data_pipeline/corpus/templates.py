"""What templates of wikitext show: words of the running text, or nothing.

Those that are known are put into words, from the innermost out; the others are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable

GONE = "\x02"  # in place of a mark, so that what stands on its two sides makes no other
WORDS = "\x03"  # before a sign that is shown at the start of a line and begins no list or table
APOSTROPHE = "\x04"  # in place of one that is shown, and is no part of the marks of italics
APART = "\x05"  # where a tag stood: marks of italics on its two sides are not one
_DROPPED = "\x06"  # in place of a template of which nothing is shown
_EQUALS, _BAR = "\x07", "\x08"  # in place of those that part no arguments of a template

# One that lost its end does not go to one behind a heading.
_INNER_TEMPLATE = re.compile(r"\{\{(?:[^{}\n]++|\n(?!={2,}+[^\n]+?={2})|\{(?!\{)|\}(?!\}))*+\}\}")

# Wikipedias: a link to one stands beside the article, not in it.
LANGUAGES = frozenset(
    """aa ab ace ady af ak als alt am ami an ang ann anp ar arc ary arz as ast atj av avk awa ay
    az azb ba ban bar bat-smg bbc bcl bdr be be-tarask be-x-old bew bg bh bi bjn blk bm bn bo
    bpy br bs btm bug bxr ca cbk-zam cdo ce ceb ch cho chr chy ckb co cr crh cs csb cu cv cy cz
    da dag de dga din diq dk dsb dtp dty dv dz ee el eml en eo epo es et eu ext fa fat ff fi
    fiu-vro fj fo fon fr frp frr fur fy ga gag gan gcr gd gl glk gn gom gor got gpe gu guc gur
    guw gv ha hak haw he hi hif ho hr hsb ht hu hy hyw hz ia iba id ie ig igl ii ik ilo inh io
    is it iu ja jam jbo jp jv ka kaa kab kbd kbp kcg kg kge ki kj kk kl km kn knc ko koi kr krc
    ks ksh ku kus kv kw ky la lad lb lbe lez lfn lg li lij lld lmo ln lo lrc lt ltg lv mad mai
    map-bms mdf mg mh mhr mi min minnan mk ml mn mni mnw mo mos mr mrj ms mt mus mwl my myv mzn
    na nah nan nap nb nds nds-nl ne new ng nia nl nn no nov nqo nr nrm nso nv ny oc olo om or os
    pa pag pam pap pcd pcm pdc pfl pi pih pl pms pnb pnt ps pt pwn qu rm rmy rn ro roa-rup
    roa-tara rsk ru rue rup rw sa sah sat sc scn sco sd se sg sgs sh shi shn si simple sk skr sl
    sm smn sn so sq sr srn ss st stq su sv sw syl szl szy ta tay tcy tdd te tet tg th ti tig tk
    tl tlh tly tn to tok tokipona tpi tr trv ts tt tum tw ty tyv udm ug uk ur uz ve vec vep vi
    vls vo vro wa war wo wuu xal xh xmf yi yo yue za zea zgh zh zh-cfr zh-classical zh-cn
    zh-min-nan zh-tw zh-yue zu""".split()
)

# Templates that stand for words of the running text; the rest is dropped. value: which arguments
# are shown, joined by a space.
_SHOWN_TEMPLATES: dict[str, tuple[int, ...]] = {
    "lang": (2,), "transl": (-1,), "transliteration": (-1,), "nowrap": (1,), "nobr": (1,),
    "convert": (1, 2), "cvt": (1, 2), "abbr": (1,), "visible anchor": (1,), "vanchor": (1,),
    "small": (1,), "smaller": (1,), "big": (1,), "sc": (1,), "smallcaps": (1,), "em": (1,),
    "strong": (1,), "var": (1,), "mvar": (1,), "math": (1,), "quote": (1,), "quotation": (1,),
    "cquote": (1,), "blockquote": (1,), "quote box": (), "nihongo": (1,), "ill": (1,),
    "interlanguage link": (1,), "formatnum": (1,), "val": (1,), "e": (1,), "10^": (1,),
    "x10^": (1,), "chem": (1,), "chem2": (1,), "gaps": (1,), "music": (1,), "flat": (), "sharp": (),
    "natural": (), "sup": (1,), "sub": (1,), "nom": (1,), "lang-en": (1,), "wikt-lang": (2,),
    "wiktlang": (2,), "sic": (1,),
    "not a typo": (1,), "as of": (1,), "tooltip": (1,), "script": (2,), "ship": (1, 2),
    "hms": (1,), "uss": (1,), "ss": (1,), "uni": (2,), "nts": (1,), "linktext": (1,),
    "gloss": (1,), "angbr": (1,), "color": (2,), "font color": (-1,), "flag": (1,),
    "flagcountry": (1,), "langx": (2,), "bibleverse": (1, 2),
}  # fmt: skip
_JOINED = {"linktext": "", "chem": "", "gaps": " "}
_SIGNS = {"flat": "♭", "b": "♭", "sharp": "♯", "#": "♯", "natural": "♮"}
_MONEY = {
    **dict.fromkeys(("us$", "usd"), "US$"), **dict.fromkeys(("a$", "aud"), "A$"),
    **dict.fromkeys(("c$", "ca$", "cad"), "C$"), **dict.fromkeys(("nz$", "nzd"), "NZ$"),
    **dict.fromkeys(("¥", "jpy", "yen"), "¥"), **dict.fromkeys(("inr", "₹", "indian rupee"), "₹"),
}  # fmt: skip
_RATIO = re.compile("[0-9]{1,3}/[0-9]{1,3}")
_FRACTIONS = frozenset(("frac", "fract", "fraction", "sfrac", "tfrac", "xfrac"))
_SYMBOL_TEMPLATES = {
    **dict.fromkeys(("ndash", "endash", "en dash", "–"), "–"),
    **dict.fromkeys(("mdash", "emdash", "em dash", "—", "mdashb"), "—"),
    **dict.fromkeys(
        ("snd", "snds", "nsndns", "spnd", "spndash", "sndash", "nbndash", "nbspndash",
         "spaced ndash", "spaced en dash", "dash"), " – ",
    ),
    **dict.fromkeys(("spaced mdash", "spaced em dash", "smd", "snmd", "spmd"), " — "),
    **dict.fromkeys(
        ("nbsp", "nbs", "space", "spaces", "thinsp", "thin space", "nnbsp", "hair space", "hairsp",
         "ensp", "emsp"), " ",
    ),
    **dict.fromkeys(("br", "break", "crlf", "pb", "paragraph break"), "\n"),
    **dict.fromkeys(("zwsp", "zwj", "zwnj", "shy", "soft hyphen", "wbr", "wj", "clear"), ""),
    **dict.fromkeys(("'", "-'", "'-"), APOSTROPHE),
    "'s": f"{APOSTROPHE}s", "'\"": f"{APOSTROPHE}\"", "\"'": f"\"{APOSTROPHE}",
    "' \"": f"{APOSTROPHE} \"", "\" '": f"\" {APOSTROPHE}", "\"": "\"", "okina": "ʻ",
    "·": "·", "middot": "·", "dot": " ·", "bull": "•", "bullet": "•", "•": "•", "pi": "π",
    "!": "|", "=": "=", "-": "-", "±": "±", "×": "×", "&": "&", "number sign": "#",
    "ae": "AE", "bc": "BC", "bce": "BCE", "ce": "CE", "ad": "AD", "circa": "c.", "c.": "c.",
    "c": "c.", "floruit": "fl.", "gbp": "£", "eur": "€", "euro": "€", "€": "€", "£": "£",
    "ft": "ft",
}  # fmt: skip


def expanded(text: str) -> str:
    """The text with what its templates show in their place."""
    for _ in range(30):
        text, count = _INNER_TEMPLATE.subn(_in_place_of_template, text)
        if not count:
            break
    return settled(text).replace(_EQUALS, "=").replace(_BAR, "|")


_MARKS = re.compile(f"[{APART}{_DROPPED}]+")


def _unparting(shown: str) -> str:
    """What stands in a template's argument and parts none of its own."""
    return shown.replace("=", _EQUALS).replace("|", _BAR)


def settled(text: str) -> str:
    """The text without the places of templates and tags, but for a space where a template stood
    between two words, and a mark where the marks of italics on its two sides would be one."""

    def put(marks: re.Match[str]) -> str:
        before, behind = (
            text[max(0, marks.start() - 2) : marks.start()],
            text[marks.end() : marks.end() + 2],
        )
        if _DROPPED in marks[0] and (
            (before[-1:].isalnum() or before == "''" or before[-1:] == "]")
            and (behind[:1].isalnum() or behind == "''" or behind[:1] == "[")
        ):
            return " "
        if (
            _DROPPED in marks[0]
            and before[-1:] in ("", "\n")
            and behind in (": ", "; ", " :", " ;")
        ):
            return WORDS  # prose goes on
        return APART if before[-1:] == behind[:1] == "'" else ""

    return _MARKS.sub(put, text)


_LINK = re.compile(r"\[\[[^\[\]]*\]\]")
# One that nothing ends, with its bar, or a picture's bars.
_OPEN_LINK = re.compile(
    r"\[\[(?:\s*+(?:file|image)\s*+:(?:[^\[\]|]*+\|(?!\s*+\w++\s*+=))*+|[^\[\]|]*+\|)",
    re.IGNORECASE,
)
# What may part two numbers, as in {{convert|5|to|10|km}}, and what is shown of it.
_RANGES = {word: f" {word} " for word in "to and or by x × +".split()}
_RANGES |= {"-": "–", "–": "–", "to(-)": " to ", "and(-)": " and ", ",": ", ", "±": " ± "}
_RANGES |= {"+/-": " ± ", "*": " × ", "xx": " × ", ", and": ", and ", "to about": " to about "}
_MONTHS = {
    number: name
    for n, name in enumerate(
        "January February March April May June July August September October November "
        "December".split(),
        1,
    )
    for number in (f"{n}", f"{n:02}")
}
_CURRENCIES = frozenset(("gbp", "eur", "euro", "£", "€"))
_SMALLER_UNITS = frozenset("in ft yd lb oz min s chain".split())  # as behind 6 ft, 12 st or 2 h
_FUNCTIONS: dict[str, Callable[[str], str]] = {
    "formatnum": str, "lc": str.lower, "uc": str.upper, "ucfirst": lambda w: w[:1].upper() + w[1:],
}  # fmt: skip


def _in_place_of_template(match: re.Match[str]) -> str:
    """What a template shows, parted from marks of italics at its sides, as it makes an element."""
    shown, text = _template_text(match), match.string
    if shown == "|" and match[0].startswith("{{{"):  # a table begins
        shown = "{|"
    if "[[" not in shown:  # the bar of a link
        shown = _unparting(shown)
    before = text[max(0, match.start() - 1) : match.start()]
    behind = text[match.end() : match.end() + 1]
    begin, end = (
        APART if sides == "''" else "" for sides in (before + shown[:1], shown[-1:] + behind)
    )
    return f"{begin}{shown}{end}"


def _template_text(match: re.Match[str]) -> str:
    inside = settled(match[0][2:-2]).removeprefix("{")  # of three braces the last two count
    name, *parts = inside.split("|")
    function, colon, word = name.partition(":")
    if colon and (does := _FUNCTIONS.get(function.strip().lower())) is not None:
        return unless_item(does(word.strip()))
    name = name.strip().lower().replace("_", " ")
    symbol = _SYMBOL_TEMPLATES.get(name)
    if symbol is not None:
        if name in _CURRENCIES:
            return symbol + "".join(parts[:1]).strip()
        dated = name in ("circa", "c.", "floruit")
        return symbol + "–".join(p.strip() for p in parts if "=" not in p) * dated
    if name.startswith("lang-"):
        shown: tuple[int, ...] = (1,)
    elif name in _SHOWN_TEMPLATES:
        shown = _SHOWN_TEMPLATES[name]
    elif name in _MONEY:
        return _MONEY[name] + "".join(parts[:1]).strip()
    elif _RATIO.fullmatch(name):
        return _fraction(match, name.split("/"))
    elif name in _FRACTIONS:
        numbers = (value.strip() for _, value in sorted(_arguments(parts)[0].items()))
        return _fraction(match, [number for number in numbers if number])
    else:
        return _DROPPED
    if "[[" in inside:  # a bar of a link parts no arguments
        for link in (_LINK, _OPEN_LINK):
            inside = link.sub(lambda found: found[0].replace("|", GONE), inside)
        parts = [part.replace(GONE, "|") for part in inside.split("|")[1:]]
    values, named = _arguments(parts)
    for key in ("text", "quote", "lt"):
        if key in named and shown:
            values[shown[0]] = named[key]
    if name == "as of":
        if "alt" in named:
            return named["alt"]
        begin = "as of" if named.get("lc", "").startswith("y") else "As of"
        date = [values.get(i, "").strip() for i in (3, 2, 1)]
        date[1] = _MONTHS.get(date[1], date[1])
        return " ".join([begin, *filter(None, date)])
    if name in ("ill", "interlanguage link") and values.get(1, "").strip() in LANGUAGES:
        values[1] = values.get(2, "")  # in the order of old, the language first
    if name == "sic":
        values[1] = values.get(1, "") + values.get(2, "")
    if name in ("convert", "cvt"):
        values = _joined_numbers(_joined_numbers(values))
    picked = [values.get(i if i > 0 else max(values, default=0), "").strip() for i in shown]
    result = " ".join(value for value in picked if value)
    if name in _JOINED:
        result = _JOINED[name].join(values[i].strip() for i in sorted(values))
    if name in ("flat", "sharp", "natural", "music"):
        return _SIGNS.get(result or name, "")
    if name == "val":
        result += _uncertainty(values)
        result += f"×10^{named['e']}" if "e" in named else ""
        result += f" {named.get('u') or named.get('ul') or ''}".rstrip()
    if name in ("e", "x10^", "10^"):
        return "10^" + result if name == "10^" else f"×10^{result}"
    if name in ("quote", "quotation", "cquote", "blockquote"):
        return f"\n{result}\n"
    if name in ("hms", "uss", "ss"):
        return f"{name.upper()} {result}"
    return unless_item(result)


def _uncertainty(values: dict[int, str]) -> str:
    """Behind the number of {{val}}: of one that varies as much up as down, or not as much; or the
    end of a range."""
    up, down = (values.get(i, "").strip() for i in (2, 3))
    if up in _RANGES:
        return _RANGES[up] + down
    return "".join((up, down)) if down else f" ± {up}" * bool(up)


def _fraction(match: re.Match[str], numbers: list[str]) -> str:
    """{{frac|3}}, {{frac|1|3}} and {{frac|2|1|3}}, also behind a whole number."""
    if len(numbers) > 2:
        whole, top, bottom, *_ = numbers
        return f"{whole} {top}⁄{bottom}"
    if not numbers:
        return ""
    behind_number = match.string[max(0, match.start() - 1) : match.start()].isdigit()
    return " " * behind_number + "⁄".join(["1"] * (len(numbers) == 1) + numbers)


def _arguments(parts: list[str]) -> tuple[dict[int, str], dict[str, str]]:
    """A template's arguments by place, as they stand, and by name."""
    values: dict[int, str] = {}
    named: dict[str, str] = {}
    unnamed = 0
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or "[[" in key or "<" in key:  # of a link's or a tag's
            unnamed += 1
            values[unnamed] = part
        elif (key := key.strip().lower()).isascii() and key.isdigit() and len(key) < 3:
            values[int(key)] = value
        else:
            named[key] = value.strip()
    return values, named


def _joined_numbers(values: dict[int, str]) -> dict[int, str]:
    """The arguments of {{convert}} with the first two numbers, of a range or of a unit and its
    part, made one."""
    unit, more = values.get(2, "").strip(), values.get(3, "").strip()
    between = _RANGES.get(unit)
    if more[:1].isdigit() and values.get(4, "").strip() in _SMALLER_UNITS:
        between = between or f" {unit} "
    if between is None:
        return values
    first = values.get(1, "").strip() + between + more
    return {1: first, **{key - 2: values[key] for key in values if key > 3}}


def as_text(shown: str) -> str:
    """What is shown, marked as such where it begins as a list or table does."""
    return WORDS + shown if shown[:1] in ("*", "#", ":", ";", "!", "=", "|") else shown


def unless_item(shown: str) -> str:
    """The same, but for what may be meant as a list: a sign and a space, or several lines."""
    return shown if shown[1:2].isspace() or "\n" in shown else as_text(shown)
