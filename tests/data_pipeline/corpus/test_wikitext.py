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
    "A {{convert|5|km|mi}} walk{{spaced ndash}}long.": ["A 5 km walk – long."],
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
    "": [],
}


@pytest.mark.parametrize("source", CASES)
def test_passages(source):
    assert passages(source) == CASES[source]


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
    ],
)
def test_clean_line(line, clean):
    assert clean_line(line) == clean


def test_disambiguation_pages_are_known_by_title_or_template():
    assert is_disambiguation("Mercury (disambiguation)", "x")
    assert is_disambiguation("Mercury", "'''Mercury''' may be\n{{disambig}}")
    assert is_disambiguation("Smith", "{{surname|x}}")
    assert not is_disambiguation(
        "Mercury (planet)", "{{about|the planet|other|Mercury (disambiguation)}}"
    )
