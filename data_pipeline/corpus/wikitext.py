"""Wikitext to passages of prose: no templates, tables, lists, headings, references, captions.

References, comments, tables and most templates are cut by regular expressions; what is left is read
mark by mark, once, so that a page costs its length whatever stands in it. Parsers that take an
opening for a construct try it to the end of the page before they take it for text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from data_pipeline.corpus.documents import cleaned, squeeze, unescape

_LIST_ITEM = "\x01"
_GONE = "\x02"  # in place of a mark, so that what stands on its two sides makes no other
_WORDS = "\x03"  # before a sign that is shown at the start of a line and begins no list or table
_APOSTROPHE = "\x04"  # in place of one that is shown, and is no part of the marks of italics
_APART = "\x05"  # where a tag stood: marks of italics on its two sides are not one
_DROPPED = "\x06"  # in place of a template of which nothing is shown
_EQUALS, _BAR = "\x07", "\x08"  # in place of those that part no arguments of a template

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_REFERENCE = re.compile(r"<(ref)\b[^<>]*>|<references\b[^<>]*/?>", re.IGNORECASE)
_BLOCKS = re.compile(
    r"<(math|gallery|timeline|syntaxhighlight|source|score|imagemap|hiero|chem|ce|graph|mapframe|"
    r"templatedata|pre|references|inputbox|section)\b[^<>]*(?<!/)>",
    re.IGNORECASE,
)
_INNER_TEMPLATE = re.compile(r"\{\{(?:[^{}]++|\{(?!\{)|\}(?!\}))*+\}\}")
_NOWIKI = re.compile(r"<nowiki>[^<]{1,500}</nowiki>", re.IGNORECASE)
_INNER_TABLE = re.compile(
    r"^[ \t:]*\{\|(?:(?!^[ \t:]*\{\|).)*?^[ \t]*\|\}", re.DOTALL | re.MULTILINE
)
_OPEN_TABLE = re.compile(
    r"^[ \t:]*\{\|.*?(?=^==|\n\n(?:['\[]|[^\W\d_a-z])|\Z)", re.DOTALL | re.MULTILINE
)
_HEADING = re.compile(r"^(?:={2,}+[^\n]+?={2,}+|=[^\n]+=[ \t]*$)", re.MULTILINE)
# MediaWiki's own, and what stands alone in its line; not the __FILE__ of a sentence.
_MAGIC = re.compile(
    r"__(?:(?:NO|FORCE)?TOC|NOEDITSECTION|(?:NO)?NEWSECTIONLINK|NOGALLERY|HIDDENCAT|(?:NO)?INDEX|"
    r"STATICREDIRECT|NO(?:TITLE|CONTENT)CONVERT|NOTC|NOCC|DISAMBIG|NOGLOBAL|START|END)__"
    r"|^[ \t]*__[A-Z]{3,60}__[ \t]*$",
    re.MULTILINE,
)
# The page as a whole is one: not {{disambiguation needed}}, {{disambiguation page link}} or
# {{no disambig}}, which stand in articles.
_DISAMBIGUATION = re.compile(
    r"\{\{\s{0,9}(?:"
    r"(?:(?:airport|biology|call ?sign|case ?law|chinese title|church|genus|geo|hn|hospital|"
    r"human name|incomplete|(?:letter[-– ]number|letter[-– ]numeral)(?: ?comb(?:ination)?)?|"
    r"math(?:s|ematics|ematical)?|military unit|mil-?unit|molecular formula|music|number|opus|"
    r"person|personal name|phonetics|place|place ?name|political party|road|school|ship|"
    r"species latin name(?: abbreviation)?|station|surname|synagogue|taxonom(?:y|ic authority)|"
    r"tla|woo number)[ -]?)?"
    r"(?:disambig(?:ua(?:tion|si|zione)?)?|disamb|dab)(?:[ -](?:page|clean ?up))?"
    r"|(?:airport|geo|hn|math|mil-unit-|number|road|school|station)dis(?:-clean ?up)?|splitdab|"
    r"surname|given name|set index)\s{0,9}[|}]"
    r"|__DISAMBIG__",
    re.IGNORECASE,
)
NOT_SHOWN = frozenset(("file", "image", "category"))
# Wikipedias: a link to one stands beside the article, not in it.
_LANGUAGES = frozenset(
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
_WIKTIONARY = re.compile(r"wikt(?:ionary)? ?: ?([^#]+)", re.IGNORECASE)
_DROPPED_TAGS = frozenset(
    "ref references gallery math timeline syntaxhighlight source score imagemap hiero chem ce "
    "graph mapframe table tr td th ul ol pre templatedata style script includeonly "
    "inputbox indicator".split()
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
    **dict.fromkeys(("'", "-'", "'-"), _APOSTROPHE),
    "'s": f"{_APOSTROPHE}s", "'\"": f"{_APOSTROPHE}\"", "\"'": f"\"{_APOSTROPHE}",
    "' \"": f"{_APOSTROPHE} \"", "\" '": f"\" {_APOSTROPHE}", "\"": "\"", "okina": "ʻ",
    "·": "·", "middot": "·", "dot": " ·", "bull": "•", "bullet": "•", "•": "•", "pi": "π",
    "!": "|", "=": "=", "-": "-", "±": "±", "×": "×", "&": "&", "number sign": "#",
    "ae": "AE", "bc": "BC", "bce": "BCE", "ce": "CE", "ad": "AD", "circa": "c.", "c.": "c.",
    "c": "c.", "floruit": "fl.", "gbp": "£", "eur": "€", "euro": "€", "€": "€", "£": "£",
    "ft": "ft",
}  # fmt: skip

_LEFT_LINK = re.compile(r"\[\[(?:[^|\[\]\n]*\|)?([^\[\]\n]*)\]\]")
# Not the <y and z> of "x<y and z>w".
_LEFT_TAG = re.compile(
    r"</?(?:(br|hr|div|table|t[dhr]|[ou]l|li|p)\b[^<>]{0,300}|"
    r"(?:ref|span|su[bp]|small|big|font)\b[^<>]{0,300}|"
    r"[a-z][a-z0-9]{0,30}(?:\s{0,9}/?|\s{1,9}[\w:-]{1,30}\s{0,9}=[^<>]{0,300}))>",
    re.IGNORECASE,
)
_LEFT_BRACES = re.compile(r"\[\[|\]\]|\{\{+|\}\}+|\{\||\|\}")
_QUOTES = re.compile(r"('{2,})")
_LEFT_ENTITY = re.compile(r"&(?:[A-Za-z]+[0-9]*|#[0-9]+|#x[0-9a-fA-F]+);")
_BARE_URL = re.compile(r"\b(?:https?|ftp)://[^\s\])|]+")
_MARKUP_START = re.compile(
    r"[*:;|\x01]|#(?!\d)|!(?!(?:!!|[\w'’-]+)(?:\s[^\s|!]+){6})|\{\||={2,}|-{4,}"
    r"|[\[\s]*(?:category\s*:|(?:file|image)\s*:(?=[^|]{0,300}(?:\||\.(?:jpe?g|png|svg|gif|tiff?|"
    r"webp|og[gvx]|web[mp]|pdf|djvu|mp[34]|wav|midi?|xcf|bmp|flac|stl)\b)))"
    r"|(?:class|style|align|colspan|rowspan|width|border|bgcolor)\s{0,9}=\s{0,9}"
    r"(?:[\"']|wikitable|[^\s|]{0,80}\s{0,9}(?:\||$|\w{1,20}\s{0,9}=))",
    re.IGNORECASE,
)
_PICTURE = re.compile(r"\|\s*(?:thumb|(?:left|right|center|upright|\d+px)\s*\|)", re.IGNORECASE)
# What a dropped template or link leaves between brackets and punctuation. It begins with a set of
# characters, for which the engine looks much faster than for alternatives.
_GAP = re.compile(
    r"[,.;:!?)\](\[\"“](?:(?<=[ (\[,;:][,.;:!?)\]])|(?<=[(\[])(?=[ ,;:–—])|(?<=\")(?= +\")"
    r"|(?<=“)(?= *”))"
)
_EMPTY_BRACKETS = re.compile(r"\(\s*(?:[,;:/–—-]\s*)*\)|\[\s*\]|“\s*”|\"\s+\"(?=[\s.,])")
_BRACKET_START = re.compile(r"([(\[])[\s,;:]+(?=[^\s)\]])")
_BRACKET_END = re.compile(r"(?<![\s,;:])[\s,;:]+([)\]])")
_SPACE_BEFORE = re.compile(r" +([,.;:!?)\]])(?=[\s\"')]|$)")
_DOUBLE_COMMA = re.compile(r"([,;])(?:\s*[,;])+")


def is_disambiguation(title: str, text: str) -> bool:
    """A page that only lists what its title may mean."""
    return title.endswith("(disambiguation)") or (
        _DISAMBIGUATION.search(text) is not None
        and _DISAMBIGUATION.search(_COMMENT.sub("", text)) is not None
    )


def passages(text: str, hidden: Container[str] = NOT_SHOWN) -> list[str]:
    """The paragraphs of prose of an article, in order, as plain text. hidden: the names in lower
    case of the namespaces, as of pictures, to which links show no words."""
    text = _COMMENT.sub("", text)
    text = _cut_elements(_REFERENCE, text)
    text = _cut_elements(_BLOCKS, text)
    text = _MAGIC.sub("", text)
    text = _NOWIKI.sub(lambda shown: _unparting(shown[0]), text)
    for _ in range(30):
        text, count = _INNER_TEMPLATE.subn(_in_place_of_template, text)
        if not count:
            break
    text = _settled(text).replace(_EQUALS, "=").replace(_BAR, "|")
    for _ in range(10):
        text, count = _INNER_TABLE.subn("\n", text)
        if not count:
            break
    text = _OPEN_TABLE.sub("\n", text)
    lines = _shown_text(_HEADING.sub(f"\n{_GONE}", text), hidden).replace(_GONE, "").split("\n")
    return [line for raw in lines if (line := clean_line(raw))]


def _cut_elements(opening: re.Pattern[str], text: str) -> str:
    """The text without the elements that `opening` begins: up to the next end tag of that name, or
    themselves where they have none of their own. Those that nothing ends stay."""
    kept: list[str] = []
    endless: set[str] = set()  # names that no end tag follows any more

    def keep(piece: str) -> None:
        if piece.startswith("'") and kept and kept[-1].endswith("'"):
            kept.append(_APART)
        if piece:
            kept.append(piece)

    at = 0
    while (tag := opening.search(text, at)) is not None:
        keep(text[at : tag.start()])
        at = tag.end()
        name = (tag[1] or "").lower()
        if not name or tag[0].endswith("/>"):
            continue
        end = None
        if name not in endless:
            end = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(text, at)
        if end is None:
            endless.add(name)
            keep(tag[0])
        else:
            at = end.end()
    keep(text[at:])
    return "".join(kept)


_MARKS = re.compile(f"[{_APART}{_DROPPED}]+")


def _unparting(shown: str) -> str:
    """What stands in a template's argument and parts none of its own."""
    return shown.replace("=", _EQUALS).replace("|", _BAR)


def _settled(text: str) -> str:
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
        return _APART if before[-1:] == behind[:1] == "'" else ""

    return _MARKS.sub(put, text)


_SCHEMES = (
    r"(?:(?:ftps?|git|gopher|https?|ircs?|mms|nntp|redis|sftp|ssh|svn|telnet|worldwind):)?//"
    r"|(?:bitcoin|geo|magnet|mailto|news|sips?|sms|tel|urn|xmpp):"
)
_MARK = re.compile(
    r"\n(?:(?P<item>[*#:;])|-{4,})?"
    rf"|(?P<begin>\[+)(?P<url>(?:{_SCHEMES})(?:(?!\{{\{{|\}}\}})[^\s\[\]<>\"])*)?"
    r"|\]+|\{\{+|\}\}+"
    r"|<(?P<end>/?)(?P<tag>[a-z][a-z0-9]*)(?=[\s/>])[^<>]*>"
    r"|&(?:[a-z]+[0-9]*|#[0-9]+|#x[0-9a-f]+);"
    r"|(?:https?|ftp)://[^\s\[\]<>\"{|}]*(?<![,;.:!?])",
    re.IGNORECASE,
)
_BRACKETS = frozenset(("{{", "[[", "["))
_NEVER_CLOSED = frozenset("br hr img link meta wbr".split())
_PARAGRAPHS = frozenset("blockquote center div p poem".split())
# What the beginning of an element shows that has no end.
_BEGINS = {"[": "[", "li": f"\n{_LIST_ITEM}", **dict.fromkeys(_PARAGRAPHS, "\n")}
# What such a tag ends where it has no end of its own, as in HTML.
_ENDS = {
    "li": frozenset(["li"]),
    **dict.fromkeys(("dd", "dt"), frozenset(["dd", "dt"])),
    **dict.fromkeys(("td", "th"), frozenset(["td", "th"])),
    "tr": frozenset(["td", "th", "tr"]),
}


class _Shown:
    """What the marks read so far show, and what they have left open.

    An end closes the last opening of its kind; what was opened since has none, and shows what
    stands behind it as if it were not there.
    """

    # An element is joined when it ends, so each letter is copied this often at most; of more that
    # are open, the first has no end.
    _DEEPEST = 32

    def __init__(self, hidden: Container[str]) -> None:
        self.pieces: list[str] = []
        self._hidden = hidden
        self._open: list[tuple[str, int]] = []  # a bracket or a tag's name, and its piece

    def last_open(self, names: Container[str], within: Container[str] = ()) -> str | None:
        """The last of these that is open, in the last of `within` if one is."""
        for name, _ in reversed(self._open):
            if name in names:
                return name
            if name in within:
                break
        return None

    def begin(self, name: str) -> None:
        while self._open and self._open[-1][0] in _ENDS.get(name, ()):
            self.leave()
        if len(self._open) == self._DEEPEST:
            self.leave(0)
        self._open.append((name, len(self.pieces)))
        self.pieces.append("")

    def end(self, name: str) -> None:
        while self._open[-1][0] != name:
            self.leave()
        _, at = self._open.pop()
        apart = "" if name in _BRACKETS else _APART
        shown = _element(name, "".join(self.pieces[at:]), self._hidden)
        self.pieces[at:] = [f"{apart}{shown}{apart}"]

    def leave(self, which: int = -1) -> None:
        """What is open there has no end."""
        name, at = self._open.pop(which)
        self.pieces[at] = _BEGINS.get(name, "" if name in _BRACKETS else _APART)

    def text(self) -> str:
        while self._open:
            self.leave()
        return "".join(self.pieces)


def _shown_text(text: str, hidden: Container[str]) -> str:
    """What is shown of text without headings, tables and references."""
    shown = _Shown(hidden)
    at = 0
    text = f"\n{text}"
    for mark in _MARK.finditer(text):
        shown.pieces.append(text[at : mark.start()])
        at = mark.end()
        match mark[0][0]:
            case "\n":
                while shown.last_open(("[",)):  # which ends with its line
                    shown.leave()
                shown.pieces.append(f"\n{_LIST_ITEM}" if mark["item"] else "\n")
            case "[":
                links, one = divmod(len(mark["begin"]) - (mark["url"] is not None), 2)
                shown.pieces.append("[" * one)
                for name in ["[["] * links + ["["] * (mark["url"] is not None):
                    shown.begin(name)
            case "]":
                left = len(mark[0])
                while (name := shown.last_open(("[[", "["))) and len(name) <= left:
                    shown.end(name)
                    left -= len(name)
                shown.pieces.append("]" * left)
            case "{":
                for _ in range(len(mark[0]) // 2):
                    shown.begin("{{")
                shown.pieces.append("{" * (len(mark[0]) % 2))
            case "}":
                left = len(mark[0])
                while left > 1 and shown.last_open(("{{",)):
                    shown.end("{{")
                    left -= 2
                shown.pieces.append("}" * left)
            case "&":
                shown.pieces.append(_as_text(_character(mark)))
            case "<":
                _read_tag(mark, shown)
            case _:
                pass  # a bare address
    shown.pieces.append(text[at:])
    return _settled(shown.text())


def _read_tag(tag: re.Match[str], shown: _Shown) -> None:
    name = tag["tag"].lower()
    if "=" not in tag[0] and _LEFT_TAG.match(tag[0]) is None:
        shown.pieces.append(tag[0])
    elif name in _NEVER_CLOSED or tag[0].endswith("/>"):
        shown.pieces.append(_element(name, "") or _APART)
    elif not tag["end"]:
        shown.begin(name)
    elif shown.last_open((name,), within=_BRACKETS):
        shown.end(name)
    elif name in _PARAGRAPHS and not shown.last_open(_BRACKETS):
        shown.pieces.append("\n")


def _element(name: str, inner: str, hidden: Container[str] = ()) -> str:
    """What a template, link or tag shows, of which `inner` is what stands in it."""
    if name == "[[":
        title, bar, words = inner.partition("|")
        if "\n" in title:
            return inner
        return _shown(title.replace(_WORDS, ""), words if bar else None, hidden)
    if name == "[":
        return _as_text(inner.strip())
    if name == "nowiki":
        return _as_text(inner.replace("'", _APOSTROPHE))
    if name == "br":
        return " "
    if name in ("hr", "table"):
        return "\n"
    if name == "li":
        return f"\n{_LIST_ITEM}"
    if name == "{{" or name in _DROPPED_TAGS:
        return ""
    return f"\n{inner}\n" if name in _PARAGRAPHS else _unless_item(inner)


_LINK = re.compile(r"\[\[[^\[\]]*\]\]")
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
    if "[[" not in shown:  # the bar of a link
        shown = _unparting(shown)
    before = text[max(0, match.start() - 1) : match.start()]
    behind = text[match.end() : match.end() + 1]
    begin, end = (
        _APART if sides == "''" else "" for sides in (before + shown[:1], shown[-1:] + behind)
    )
    return f"{begin}{shown}{end}"


def _template_text(match: re.Match[str]) -> str:
    inside = _settled(match[0][2:-2])
    name, *parts = inside.split("|")
    function, colon, word = name.partition(":")
    if colon and (does := _FUNCTIONS.get(function.strip().lower())) is not None:
        return _unless_item(does(word.strip()))
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
        inside = _LINK.sub(lambda link: link[0].replace("|", _GONE), inside)
        parts = [part.replace(_GONE, "|") for part in inside.split("|")[1:]]
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
    if name in ("ill", "interlanguage link") and values.get(1, "").strip() in _LANGUAGES:
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
    return _unless_item(result)


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


def _as_text(shown: str) -> str:
    """What is shown, marked as such where it begins as a list or table does."""
    return _WORDS + shown if shown[:1] in ("*", "#", ":", ";", "!", "=") else shown


def _unless_item(shown: str) -> str:
    """The same, but for what may be meant as a list: a sign and a space, or several lines."""
    return shown if shown[1:2].isspace() or "\n" in shown else _as_text(shown)


def _is_prose(title: str, named: bool, hidden: Container[str]) -> bool:
    """Whether a link to this title, with a text of its own (`named`) or without, shows words: no
    picture, category or other language."""
    prefix, colon, rest = title.partition(":")
    if not colon:
        return True
    prefix = prefix.replace("_", " ").strip().lower()
    if prefix in _LANGUAGES:
        return rest[:1] in (" ", "_")  # a title, as "It: Chapter Two"
    return prefix not in hidden and (named or prefix != "media")


def _shown(title: str, text: str | None, hidden: Container[str]) -> str:
    """What a link shows."""
    if not _is_prose(title, text is not None, hidden):
        return ""
    if text is None:
        text = title.strip().lstrip(":").replace("_", " ")
        if word := _WIKTIONARY.match(text):
            text = word[1]
    return _as_text(_without_quotes(text))


def _character(entity: re.Match[str]) -> str:
    return unescape(entity[0]).replace("'", _APOSTROPHE)


def _without_quotes(line: str) -> str:
    """The line without the marks of italics and bold, with the apostrophes among them, by the rules
    of MediaWiki: of four the first is one, of more than five all but five; and of bold that nothing
    ends, in a line whose italics are not ended either, the first is an apostrophe and italics, best
    behind a letter that stands alone, then behind a longer word, then behind a space."""
    if "''" not in line:
        return line
    parts = _QUOTES.split(line)  # text, marks, text, ...
    places = range(1, len(parts), 2)
    lengths = {at: len(parts[at]) for at in places}
    for at, length in lengths.items():
        spare = 1 if length == 4 else max(0, length - 5)
        parts[at], lengths[at] = "'" * spare, length - spare
    italic, bold = (sum(n in (k, 5) for n in lengths.values()) for k in (2, 3))
    if italic % 2 and bold % 2:
        best: dict[str, int] = {}
        for at in (at for at in places if lengths[at] == 3):
            before = parts[at - 1] + parts[at]
            kind = "space" if before[-1:] == " " else "letter" if before[-2:-1] == " " else "word"
            best.setdefault(kind, at)
        chosen = next((best[kind] for kind in ("letter", "word", "space") if kind in best), None)
        if chosen is not None:
            parts[chosen] += "'"
    return "".join(parts)


def _in_place_of_tag(tag: re.Match[str]) -> str:
    return " " if tag[1] else ""


def _is_markup(line: str) -> bool:
    return (
        _MARKUP_START.match(line) is not None
        or ("|" in line and _PICTURE.search(line) is not None)
        or line.endswith("==")
    )


def clean_line(line: str) -> str:
    """One line of prose without what markup left behind; empty when nothing or no prose is left."""
    line = line.strip()
    if not line or _LIST_ITEM in line or _is_markup(line):
        return ""
    is_text = line[0] == _WORDS
    line = line.replace(_WORDS, "")
    if "&" in line:
        line = _LEFT_ENTITY.sub(lambda m: unescape(unescape(m[0])), line)
        line = _LEFT_ENTITY.sub(_character, line)
    marked = line
    if "[[" in line:
        line = _LEFT_LINK.sub(r"\1", line)
    if "<" in line:
        line = _LEFT_TAG.sub(_in_place_of_tag, line)
    if "[[" in line or "]]" in line or "{" in line or "}" in line:
        line = _LEFT_BRACES.sub("", line)
    # What was hidden behind a tag or brace may be a list item or a table row after all. What quotes
    # hide, as of '''!!!''', is words.
    if line != marked and not is_text and _is_markup(line.strip()):
        return ""
    if "//" in line:
        line = _BARE_URL.sub("", line)
    line = cleaned(_without_quotes(line).replace(_APOSTROPHE, "'"))
    if _GAP.search(line):
        line = _close_gaps(line)
    return line if any(map(str.isalnum, line)) else ""


def _close_gaps(line: str) -> str:
    for _ in range(3):
        before = line
        line = _EMPTY_BRACKETS.sub("", line)
        line = _BRACKET_START.sub(r"\1", line)
        line = _BRACKET_END.sub(r"\1", line)
        if line == before:
            break
    line = _SPACE_BEFORE.sub(r"\1", squeeze(line))
    return _DOUBLE_COMMA.sub(r"\1", line)
