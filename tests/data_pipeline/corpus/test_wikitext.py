import random
import re

import pytest

from data_pipeline.corpus.wikitext import clean_line, is_disambiguation, passages

CASES = {
    "'''Bold''' and ''italic'' text.": ["Bold and italic text."],
    "A [[link]], a [[page|shown]], an [http://x.org outer link] and [[:fr:Kept name]].": [
        "A link, a shown, an outer link and fr:Kept name."
    ],
    "Before<ref name=x>note {{cite|a}}</ref> after<ref name=x />.": ["Before after."],
    "Kept.\n* item one\n# item two\n: indented\n; term\nKept too.": ["Kept.", "Kept too."],
    "== Heading ==\nProse.\n=== ''Other'' ===": ["Prose."],
    "Name ({{IPA|x}}; born 5 May) and ({{lang|el|λόγος}}, {{IPA|y}}) and ({{IPA|z}}).": [
        "Name (born 5 May) and (λόγος) and."
    ],
    "{{convert|6|ft|2|in|m|abbr=on}}, {{convert|12|st|7|lb|kg}}, {{cvt|3|,|4|and|5|km|mi}}.": [
        "6 ft 2 in, 12 st 7 lb, 3, 4 and 5 km."
    ],
    "{{convert|5|±|1|km}} {{convert|10|mi|km|0}} {{formatnum:12345}} {{lc:ABC}} {{uc: d}}.": [
        "5 ± 1 km 10 mi 12345 abc D."
    ],
    "{{As of|2013|June|8}} and {{as of|2015|6|30|lc=y}} and {{as of|2010}}.": [
        "As of 8 June 2013 and as of 30 June 2015 and As of 2010."
    ],
    "The town had, {{as of|2010|alt=in [[2010]]}}, a mayor.": ["The town had, in 2010, a mayor."],
    "{{as of|2013|0120}} and {{as of|2013|²}} and {{as of|2013|06}}.": [
        "As of 0120 2013 and As of ² 2013 and As of June 2013."
    ],
    "{{ill|de|Schule|Schule in Gotha}}, {{ill|Name|de|lt=shown}}, {{val|6.2|e=18|u=m}}.": [
        "Schule, shown, 6.2×10^18 m."
    ],
    "{{£|500}}, {{EUR|3}}, {{sic|wier|d}}, {{circa|1500|1510}}, {{cvt|3|, and|5|km}}.": [
        "£500, €3, wierd, c.1500–1510, 3, and 5 km."
    ],
    "A {{convert|5|km|mi}} walk{{spaced ndash}}long.": ["A 5 km walk – long."],
    "1914{{spaced en dash}}1918, a{{mdashb}}b, one{{pb}}two{{Unknown}}three{{x}}{{y}}four{{z}}.": [
        "1914 – 1918, a—b, one",
        "two three four.",
    ],
    "3{{frac|1|2}} by {{frac|5|3|4}}, {{Frac|3}}, −{{sfrac|2|3}}, {{linktext|北|京}}.": [
        "3 1⁄2 by 5 3⁄4, 1⁄3, −2⁄3, 北京."
    ],
    "{{font color|white|black|Shown}}, {{color|red|words}}, su{{shy}}per, Hawai{{okina}}i.": [
        "Shown, words, super, Hawaiʻi."
    ],
    "[[1914]]{{long dash}}[[1918]], 1914{{x}}''1918'', A{{efn|a}}{{'s}}, a{{x}}{{ndash}}b{{x}}.": [
        "1914 1918, 1914 1918, A's, a–b."
    ],
    "{{frac|1=3|2=4}}, {{frac||}}, {{val|5.2|0.3|u=km}}, {{val|3|-|5}}, {{val|1|+2|-3}}.": [
        "3⁄4, 5.2 ± 0.3 km, 3–5, 1+2-3."
    ],
    "({{nowrap|''Z'' {{=}} 1}}) {{lang|fr|Le {{!}} P}}, {{nobr|r <nowiki>=</nowiki> s}}.": [
        "(Z = 1) Le | P, r = s."
    ],
    "{{quote|All of {{math|1=''n'' = 5}} in.|John}}{{quote|<poem style='m:2em'>Tyger</poem>|B}}": [
        "All of n = 5 in.",
        "Tyger",
    ],
    "{{quote|The union {sic} is.}}\nSet {{math|{1, 2}}} and {{nowrap|{a, b}}} are.": [
        "The union {sic} is.",
        "Set {1, 2} and {a, b} are.",
    ],
    "5.98{{e|24}} kg, 1.9{{x10^|9}}, {{gaps|1|000|000}}, B{{music|flat}}, C{{sharp}}, 3{{1/2}}.": [
        "5.98×10^24 kg, 1.9×10^9, 1 000 000, B♭, C♯, 3 1⁄2."
    ],
    "{{US$|25 million}} and {{JPY|300}} for {{chem|H|2|O}} and {{chem2|CO2}}.": [
        "US$25 million and ¥300 for H2O and CO2."
    ],
    # Apostrophes beside italics and bold, by MediaWiki's rules.
    "''a''<sub>''n''</sub> and ''x''<sup>''n''</sup>, ''y''{{sub|''n''}}, ''z''{{efn|1}}''n''.": [
        "an and xn, yn, z n."
    ],
    "''H''<ref>A</ref><ref name=b />''M'', ''L''<nowiki/>''O'', ''I''{{x}}<ref>c</ref>''J''.": [
        "HM, LO, I J."
    ],
    "The ''A''<nowiki/>'s and ''B''<nowiki/>'s, ''C''{{efn|a}}'s, ''D''<ref>x</ref>'s.": [
        "The A's and B's, C's, D's."
    ],
    "<small>''A''</small>'s, {{lang|fr|''B''}}'s and <span lang=fr>''C''</span>'s sisters.": [
        "A's, B's and C's sisters."
    ],
    "The ''Titanic''{{'s}} and ''Olympic''{{'}}s, [[Iliad|''Iliad'']]{{'s}} and ''Ilium'''s.": [
        "The Titanic's and Olympic's, Iliad's and Ilium's."
    ],
    "''A''&#39;s, ''B''<nowiki>'s</nowiki>, {{'\"}}C{{\"'}}.": ["A's, B's, '\"C\"'."],
    "Only l'''Iliade'' of it, ''''four'''', ''''''six'''''', '''''five'''''.": [
        "Only l'Iliade of it, 'four', 'six', five."
    ],
    "Text\n{| class=wikitable\n! head\n|-\n| cell {{x|[[y]]}}\n{|\n| inner\n|}\n|}\nMore text.": [
        "Text",
        "More text.",
    ],
    "[[File:a.jpg|thumb|A [[caption]] here]] Prose stays. [[Category:Things]]": ["Prose stays."],
    "{{Infobox|a=b|c={{d|e}}}}The lead.": ["The lead."],
    "a&nbsp;b &amp; c &lt;tag&gt; caf&eacute; &ndash; d": ["a b & c café – d"],
    "H<sub>2</sub>O <!-- hidden --> flows.<br/>Next": ["H2O flows. Next"],
    "<math>x^2</math> is <code>code</code> <gallery>\nFile:x.jpg|y\n</gallery>": ["is code"],
    "__NOTOC__ Text. [[fr:Page]]": ["Text."],
    "Unbalanced {{open text and [[link and ''quote": ["Unbalanced open text and link and quote"],
    "<blockquote>Quoted words.</blockquote>": ["Quoted words."],
    "{{Quote|Said so.|author=X}} End.": ["Said so.", "End."],
    "<nowiki>[[kept]]</nowiki>": ["kept"],
    # A sign behind what shows nothing begins no list; one behind what is not there does.
    "<math>x</math>; it is.\n\n[[File:a.png]] : it is.\n\n<nowiki/>* it is.\n\n{{x}}: it is.\n\n"
    "<ref>a</ref> # it is.": ["; it is.", ": it is.", "* it is.", ": it is.", "# it is."],
    "{{x}}* item\n<!-- a -->* item\n<math>x</math>\n* item\n{{y}}:item\n[[Category:Z]]\n# item": [],
    "<math>a</math> <math>b</math> one.\n\n<references /> <!-- c -->\n<ref>e</ref> <!-- d --> f.": [
        "one.",
        "f.",
    ],
    # An element ends with its own end, whatever marks stand in it.
    "A.<ref>B <!-- c?</ref> D.\n\n<source lang=x>\n<ref name=a>\n</source>\nE.<ref>f</ref> G "
    "<pre>\n<ref>\n</pre>H <!-- <pre> -->''I''<!-- j --><ref>k</ref>''L''.<ref name=m /> N "
    "<math><!--</math>O.": ["A. D.", "E. G H IL. N O."],
    # The marks of comments and elements that are shown, or stand in code, begin none.
    "By <nowiki><!--</nowiki> it is, <nowiki><pre></nowiki> and <nowiki></pre></nowiki> too.\n\n"
    "<pre>\n<!-- a\n</pre>\nIt stays. <!-- b <nowiki> --> So.\n\n{{small|<nowiki>}}</nowiki>c}}.": [
        "By <!-- it is, and too.",
        "It stays. So.",
        "c.",
    ],
    "": [],
    # Links: what stands beside an article is no text of it, whatever else has a colon is.
    "A [[wikt:mane|mane]], [[s:A b|works]], [[Media:a.ogg|heard]] and [[wikt:axil#Noun]].": [
        "A mane, works, heard and axil."
    ],
    "See [[CSI: Miami]], [[It: Chapter Two]], [[Re:Zero]] and [[Ben-Hur: A Tale|''Ben'' Hur]].": [
        "See CSI: Miami, It: Chapter Two, Re:Zero and Ben Hur."
    ],
    "He [[de:Titel|x]][[zh-yue:Y]][[Image:a.png|b]][[category:C|d]][[Media:a.ogg]]went.": [
        "He went."
    ],
    "Listed in [[:Category:Ships]] of that year.": ["Listed in Category:Ships of that year."],
    # Words that begin as a list, a table or a heading does.
    "[[!Kung people|!Kung]] live.\n\n[[*NSYNC]] sang.\n\n{{lang|x|!Xóõ}} is.\n\n<b>!!!</b> is.": [
        "!Kung live.",
        "*NSYNC sang.",
        "!Xóõ is.",
        "!!! is.",
    ],
    "&#42;NSYNC sang.\n\n<nowiki>#</nowiki>1 Girl is.\n\n[http://x.org *NSYNC] sang.": [
        "*NSYNC sang.",
        "#1 Girl is.",
        "*NSYNC sang.",
    ],
    "{{small|* a}}\n<small>* b</small>\n}}* c\n{{x}}| d || e\n{{!}} f": [],
    # Arguments of templates.
    "{{Quote|In [[Paris, Texas|Paris]] he stayed.}} {{nowrap|[[A|b]] c}}": [
        "In Paris he stayed.",
        "b c",
    ],
    "{{lang|fr|2=mot}}, {{cvt|5|to(-)|9|km}}, {{convert|2|-|3.5|m|ft|abbr=on}}.": [
        "mot, 5 to 9 km, 2–3.5 m."
    ],
    "{{cvt|1|x|2|by|3|m}}, {{cvt|2=to}}.": ["1 x 2 by 3 m, to."],
    "On {{HMS|Victory|1765|6}} and {{ship|USS|Ohio}}.": ["On HMS Victory and USS Ohio."],
    f"<span style='{'a' * 500}'>Styled</span> words.": ["Styled words."],
    "The macro __FILE__ is text. __NOTOC__\n__SOMMAIRE__": ["The macro __FILE__ is text."],
    "If x<y and z>w, &lt;u, v&gt; is in &lt;a.h&gt;, <odd x=y>not</odd> &lt;i&gt;so&lt;/i&gt;.": [
        "If x<y and z>w, <u, v> is in <a.h>, not so."
    ],
    "<noinclude>{{Infobox}}\nThe season began.</noinclude>": ["The season began."],
    "<ul><li>One<li>Two</ul>\n<dl><dt>Term<dd>Words of it.</dl>\n<div><td>Cell<td>two</div>": [
        "TermWords of it.",
        "Celltwo",
    ],
    "== A = b ==\n=One=\n==Two== words.\n= 2 + 2 is four.\n=====\nHere <i>[[a|b</i>]] ends.": [
        "words.",
        "= 2 + 2 is four.",
        "Here b ends.",
    ],
    "A line<br.> parted, {{a|[[b}} here]] and [[File:a.jpg|thumb|a {{c|''d'']] on.": [
        "A line parted, here and on."
    ],
    "Words,\n<li>one\n<li>two\n\nand more.": ["Words,", "and more."],
    "{|\n| never closed\n\nÉtienne wrote.": ["Étienne wrote."],
}


@pytest.mark.parametrize("source", CASES)
def test_passages(source):
    assert passages(source) == CASES[source]


@pytest.mark.parametrize(
    "name", ["ref", "Ref name='x'", "math", "chem", "gallery", "timeline", "maplink"]
)
def test_an_element_that_is_no_prose_ends_before_another_of_its_name(name):
    kind = name.split()[0]
    prose = [f"Paragraph {n} says words of its own.<{name}>note</{kind}>" for n in range(9)]
    shown = [text.partition("<")[0] for text in prose]
    assert passages("\n\n".join(prose)) == shown
    prose[2] = prose[2].replace("</", "<|")
    found = passages("\n\n".join(prose))
    assert found[:2] + found[3:] == shown[:2] + shown[3:] and found[2].startswith(shown[2])
    prose[2] = f"Paragraph 2 says words of its own.<{name}>a {{{{b<{kind} name=y />}}}}</{kind}>"
    assert passages("\n\n".join(prose)) == shown


@pytest.mark.parametrize("name", ["nowiki", "pre", "syntaxhighlight", "source"])
def test_what_is_shown_as_it_is_written_may_hold_its_own_beginning(name):
    found = passages(f"Before.\n\n<{name}>a <{name}> b\n\nc</{name}>\n\nBehind.")
    assert [found[0], found[-1]] == ["Before.", "Behind."]
    assert (len(found) == 2) == (name != "nowiki")


@pytest.mark.parametrize("end", ["\n\n", "\n \t\n", ""])
def test_a_comment_without_end_takes_its_paragraph_alone(end):
    assert passages(f"One.\n\nTwo <!-- a --> b.<!-- c\nd{end}") == ["One.", "Two b."]
    if end:
        assert passages(f"One <!-- a.{end}Two.{end}* item{end}Three.<!--") == [
            "One",
            "Two.",
            "Three.",
        ]


@pytest.mark.parametrize("odd", ["k <n we have m = 3.", 'it was so.<ref name="x"', "a <br and = b"])
def test_a_tag_ends_in_its_paragraph(odd):
    """And a word with other words before a "=" begins none."""
    prose = [f"Paragraph {n} says some words of its own.<ref>note {n}</ref>" for n in range(9)]
    shown = [text.partition("<ref>")[0] for text in prose]
    prose[2] += f" Here {odd}"
    prose[7] += " Here x > y."
    found = passages("\n\n".join(prose))
    assert len(found) == 9 and found[3:7] == shown[3:7]
    assert found[2].startswith(shown[2]) and found[7].startswith(shown[7])
    assert passages("In the case k <n we have m = 3 and x > y.") == [
        "In the case k <n we have m = 3 and x > y."
    ]


@pytest.mark.parametrize(
    ("open", "behind"),
    [
        ("[[File:a.jpg|thumb|A river.", "a[b[0]] of code."),
        ("[[Category:Rivers", "b[c[1]] of code."),
        ("{{Infobox river|length=3", '{"a":{"b":1}} of JSON.'),
        ("{{Infobox river|length={{convert|3|km}}", "x^{a_{b}} of TeX."),
    ],
)
def test_what_has_no_end_ends_before_a_heading(open, behind):
    prose = [f"Paragraph {n} says some words of its own." for n in range(9)]
    text = "\n\n".join([open, *prose[:3], "== More ==", *prose[3:], f"Here {behind}"])
    assert [line for line in passages(text) if line.startswith("Paragraph")] == prose
    assert passages(text)[-1].startswith("Here ")


@pytest.mark.parametrize(
    "template", ["quote|{}", "lang|fr|{}", "nowrap|{}", "quote|text={}|author=X", "sic|{}"]
)
def test_a_link_without_end_takes_no_words_of_its_template(template):
    inner = "One [[Tupi people|two words] and three.\n\nFour [[five|six]] seven."
    found = " ".join(passages("{{" + template.format(inner) + "}}"))
    assert found.endswith("two words] and three. Four six seven.") and found.startswith("One ")
    picture = "One.\n\n[[File:a.jpg|thumb|left|A [[river]].\n\nFour [[five|six]] seven."
    found = passages("{{" + template.format(picture) + "}}")
    assert found[0] == "One." and found[-1] == "Four six seven."


@pytest.mark.parametrize(
    "half",
    ["[[File:a.jpg|thumb|A river]", "[[File:a.jpg|thumb|left|A [sic] [[b|c]] river]",
     "[[File:a.jpg|thumb|A river][[File:b.jpg|thumb|A [http://a.b mill]]]", "[[Category:Rivers]",
     "[[File:a.jpg|thumb|The [[bridge] here]]", "[[File:a.jpg|thumb|The [[b (x)|b]Y here]]",
     "[[File:a.jpg|thumb|A [[File:b.jpg|20px] and [[c]]]]"],
)  # fmt: skip
def test_half_an_end_of_a_picture_ends_it_where_nothing_else_does(half):
    words = "Words of the paragraph say [sic] more than [[Rivers|it]] would."
    assert passages(f"{half}{words}") == ["Words of the paragraph say [sic] more than it would."]
    assert passages(f"One. {half}\n{words}\n\n== Two ==\nThree.")[::2] == ["One.", "Three."]
    assert passages("[[File:a.jpg|thumb|1] and 2] of it]] Two.") == ["Two."]
    assert passages("[[File:a.jpg|thumb|A [[b|c]d]] e]] Two [[b|c]d]].") == ["Two c]d."]


def test_words_stay_that_lost_the_line_end_before_what_is_none():
    """A heading, or a picture that has no end either."""
    assert passages("Some words. == Heading ==\nMore.") == ["Some words.", "More."]
    assert passages("Some words.=== E = mc^2 ===") == passages("Some words.")
    assert passages("Some words. [[File:a.jpg|thumb|A river.\n\nMore.") == ["Some words.", "More."]
    assert passages("Heading ==\nMore a == b.") == ["More a == b."]


@pytest.mark.parametrize("cut", ["\n\n=", "\n\n==", "\n\n== Hi", "==\n\n", "=\n\n", "ory ==\n\n"])
def test_a_paragraph_joined_to_a_cut_heading_stays(cut):
    prose = [f"Words of paragraph {n}, of which there are many in each of them." for n in range(2)]
    text = f"{prose[0]}\n\n== History ==\n\n{prose[1]}"
    assert passages(text) == prose
    found = " ".join(passages(text.replace(cut, "", 1)))
    assert all(line in found for line in prose)
    assert passages(f"{prose[0]} ==\n\n== {prose[1]}") == prose
    assert not passages("== History\n\nHistory ==")


@pytest.mark.parametrize(
    "source", ["[[One||Two]]", "<b>|Two</b>", "<nowiki>|</nowiki>Two", "&#124;Two"]
)
def test_a_bar_that_is_shown_begins_no_row(source):
    assert passages(f"{source} and three.") == ["|Two and three."]


@pytest.mark.parametrize(
    "picture",
    ["[File:a.jpg|left|thumb|A [[b|c]].]]", "[[File;a.jpg|thumb|A.]]", "[[Fike:a.jpg|10px|A.]]",
     "{[File:a.jpg|thumb|A.]]", "[File:a.jpg|thumb|The [sic] over it.]]"],
)  # fmt: skip
def test_a_picture_with_half_a_mark_takes_no_words_of_its_line(picture):
    assert passages(f"One. {picture} Two.") == passages("One. [[File:a.jpg|thumb|A.]] Two.")
    assert passages(f"{picture}Two.") == ["Two."]
    assert passages("His [[Finger|thumb]], [[b|right]].") == ["His thumb, right."]


def test_of_three_braces_the_last_two_begin_a_template():
    assert passages("{{{quote|One.}}") == passages("{{quote|One.}}") == ["One."]
    table = "{{{!}} class=wikitable\n{{!}} a cell\n{{!}}}"
    assert passages(f"One.\n\n{table}\nTwo.") == ["One.", "Two."]


def composed(rng, deep=0):
    """Wikitext of marks within each other, and the words that it shows."""
    source, words = [], []
    for _ in range(rng.randint(1, 4)):
        word = rng.choice("abcdefghijklmnop") * 3
        inner, shown = composed(rng, deep + 1) if deep < 4 else (word, [word])
        mark, visible = rng.choice(
            [
                (f"{word} ", [word]),
                (f"[[{word}|{inner}]] ", shown),
                (f"[[File:{word}.jpg|thumb|{inner}]] ", []),
                (f"[http://x.org/{word} <b>{word}</b>] ", [word]),
                (f"<span class='{word}'>{inner}</span> ", shown),
                (f"<i>''{inner}''</i> ", shown),
                (f"{{{{x|{{{inner}}}}}}} ", []),
                (f"{{{{nowrap|{word}}}}} http://x.org/{word}. ", [word]),
                (f"&quot;{word}&quot;<br /> ", [word]),
            ]
        )
        source.append(mark)
        words += visible
    return "".join(source), words


@pytest.mark.parametrize("left_open", ["", "<font> <small> <b> ", "[[ ", "{{ ", "<b>[[a|{{b|"])
def test_marks_within_each_other_show_their_words_whatever_stays_open_before(left_open):
    rng = random.Random(len(left_open))
    for _ in range(60):
        source, words = composed(rng)
        text = f"{left_open * 50}\n\nBegin {source}"
        shown = " ".join(passages(text)).partition("Begin")[2]
        assert [w for w in re.findall(r"\w+", shown) if w[0] in "abcdefghijklmnop"] == words, source


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        ("Fine, as it is (really).", "Fine, as it is (really)."),
        ("Gone ( ; ) and ( , x) and (y ; ) .", "Gone and (x) and (y)."),
        ("|cell || other", ""),
        ("* item", ""),
        ("left [[link|shown]] and }} braces", "left shown and braces"),
        ("see http://example.org/x now", "see now"),
        ("pic.jpg|thumb|caption", ""),
        ("[[Category:People]]", ""),
        ("&amp;nbsp; twice escaped", "twice escaped"),
        ("... !", ""),
        ("'''!!!''' is a band", "!!! is a band"),
        ("'''#1 Girl''' is an album", "#1 Girl is an album"),
        ("'''*NSYNC''' {{were", "*NSYNC were"),
        ("'''''Image: Art, Faith''''' is", "Image: Art, Faith is"),
        ("Image: Art, Faith is a journal", "Image: Art, Faith is a journal"),
        ("[[Image:a b.jpg", ""),
        ("File:a|a caption", ""),
        ("#1 Girl is an album", "#1 Girl is an album"),
        (
            "!!! is a band of dance music from Sacramento",
            "!!! is a band of dance music from Sacramento",
        ),
        (
            "!Kung people live there in the desert land",
            "!Kung people live there in the desert land",
        ),
        ("! Year of the birth of a king", ""),
        ("!Year !! Title of the film and its maker", ""),
        ("}}| cell || other", ""),
        ("Width = 5 metres was measured", "Width = 5 metres was measured"),
        ('width = "5" | x', ""),
        ("align=center width=5% | x", ""),
        ("{|class=wikitable sortable", ""),
        ("won in Category: Best Song of it", "won in Category: Best Song of it"),
        ("rock; R&B; B&Bs; M&Ms; &nbps; jazz", "rock; R&B; B&Bs; M&Ms; &nbps; jazz"),
    ],
)
def test_clean_line(line, clean):
    assert clean_line(line) == clean


def test_half_pictures_cost_their_length():
    # Hours where each looks at the rest of the line.
    for mark in ("{a|", "{a|b ", "[a|", "[[a|"):
        assert "thumb" not in clean_line("Words |thumb| " + mark * 100_000)


def test_disambiguation_pages_are_known_by_title_or_template():
    assert is_disambiguation("Mercury (disambiguation)", "x")
    assert is_disambiguation("Mercury", "'''Mercury''' may be\n{{disambig}}")
    assert is_disambiguation("Smith", "{{surname|x}}")


@pytest.mark.parametrize(
    "template",
    ["Disambiguation|geo", "dab", "hndis|A, B", "Human name disambiguation", "geodis"]
    + ["Disambiguation page", "disambiguation cleanup", "Disambigua", "Disambiguasi"]
    + ["Letter-number combination disambiguation", "numberdis", "Mathematical disambiguation"]
    + ["School disambiguation", "letter-numbercombdisambig", "Species Latin name disambiguation"],
)
def test_a_template_makes_a_page_a_disambiguation(template):
    assert is_disambiguation("Mercury", f"May be\n{{{{{template}}}}}")


@pytest.mark.parametrize(
    "text",
    [
        "{{about|the planet|other|Mercury (disambiguation)}}",
        "He met [[Smith]]{{disambiguation needed|date=May 2012}}",
        "{{Disambig-needed}} {{needs disambiguation}} {{No disambig}} {{no disambiguation}}",
        "{{Disambiguation page link|x}} {{R to disambiguation page}}",
        "<!-- {{disambiguation}} is no template for this -->",
    ],
)
def test_a_template_within_an_article_does_not(text):
    assert not is_disambiguation("Mercury (planet)", text)
