"""HTML: which words of a page are prose, and at what cost."""

import random

import pytest

from data_pipeline.corpus.web_pages import html_paragraphs


@pytest.mark.parametrize(
    ("inside", "paragraphs"),
    [
        ("a river<br>until the war<br/>and", ["a river until the war and"]),
        ("one<p>two</p>three", ["one", "two", "three"]),
        ("one<script>x</script> <b>two</b>,\n\nthree", ["one", "two,", "three"]),
    ],
)
def test_lines_of_a_listing_that_are_told_by_elements_do_not_stick(
    inside: str, paragraphs: list[str]
) -> None:
    assert html_paragraphs(f"<p>before<pre>{inside}</pre>behind") == [
        "before", *paragraphs, "behind"
    ]  # fmt: skip


def test_cdata_of_xhtml_is_text_and_that_of_html_a_comment() -> None:
    page = (
        "<html><p>One. <![CDATA[Two, a < b & c.]]> Three.</p><script>//<![CDATA[\nx\n//]]></script>"
    )
    assert html_paragraphs(f'<?xml version="1.0"?>{page}') == ["One. Two, a < b & c. Three."]
    assert "Two" not in html_paragraphs(page)[0]


@pytest.mark.parametrize(
    ("page", "paragraphs"),
    [
        ("<p>One.</p><nav><div>Menu</nav><p>Two.</p>", ["One.", "Two."]),
        ("<p>One.<noscript><div><img src=x></noscript><p>Two.", ["One.", "Two."]),
        ("<div><ul role=navigation><li><div>x</ul>One.</div>Two.", ["One.", "Two."]),
        ("<div><aside>x</aside></div>One.<pre class=code><b>x</pre>Two.", ["One.", "Two."]),
        ("<nav>One.<p>Two.", ["One.", "Two."]),
        ("<button>x</button><button>x</button>One.", ["One."]),
        ("<a><svg><path></a>One.<p>Two.", ["One.", "Two."]),
        ("<svg><title>x</title><path/><p>One.", ["One."]),
        ("<!-- > --><p>One.<!--><p>Two.<!-- <nav> --!>Three.", ["One.", "Two.Three."]),
        ("One.<!-- <b>x</b> <p>Two.", ["One.x", "Two."]),
        ("<script><!-- a('<script></script>') --></script>One.", ["One."]),
        ("<script>a</script>One.<script>if (b <c)", ["One.", "if (b"]),
        ("<p title='>' class=a/b>One </br>and<o:p> two</o:p>.", ["One", "and two."]),
        ('1 < 2 and <a href="x>3</a> <p>Two.', ["1 < 2 and 3", "Two."]),
        ("<div class=highlight><i></i><pre>x</pre></div><pre><b></b><code>x</pre>One.", ["One."]),
        ("<pre>Some prose of <code>code</code>.</pre>One.", ["Some prose of code.", "One."]),
    ],
)
def test_a_page_is_read_as_browsers_read_it(page: str, paragraphs: list[str]) -> None:
    assert html_paragraphs(page) == paragraphs


def test_of_what_holds_no_prose_nothing_is_kept_and_of_all_else_each_word() -> None:
    """Whatever its author has left open in it."""
    draw = random.Random(3)
    left_out = "nav footer aside button object noscript svg video select iframe".split()

    def inside() -> str:
        tags = draw.choices(
            ["<a>", "<g>", "</i>", "<x-y>", "<use/>", "<!-- > -->", "<path d='>'>"], k=3
        )
        return " gone ".join(["", *tags, ""])

    for _ in range(300):
        words, page = [], []
        for n in range(draw.randint(3, 12)):
            words.append(f"w{n}")
            element = draw.choice(left_out)
            page += [draw.choice(["<div>", "</div>", "<p>", "<li>", "<b>", "</p>", "<br>"])]
            page += [f" w{n} ", f"<{element}>{inside()}</{element.upper()} >"]
        found = " ".join(html_paragraphs("".join(page))).split()
        assert found == words, "".join(page)


@pytest.mark.parametrize(
    ("page", "paragraphs"),
    [
        ("<table><tr><td role=navigation>One<td>Two<tr><td>Three", ["One", "Two", "Three"]),
        ("<ul><li role=search>One<li>Two</ul><dl><dt role=navigation>Three<dd>Four</dl>Five",
         ["One", "Two", "Three", "Four", "Five"]),
    ],
)  # fmt: skip
def test_what_may_lack_its_end_tag_is_not_left_out_by_its_role(
    page: str, paragraphs: list[str]
) -> None:
    assert html_paragraphs(page) == paragraphs


@pytest.mark.parametrize("name", ["script", "style"])
@pytest.mark.parametrize("end", ["</{}>", "/{}>", "<{}>", "</{}", "</{}x>", "<//{}>", ""])
def test_a_program_whose_end_tag_is_damaged_takes_only_itself_along(name: str, end: str) -> None:
    code = f"<{name}>a {{ b: '<i>c</i>'; }} d <e> f;\n{end.format(name)}"
    page = f"<head>{code}<link rel=x></head><body><p>One.</p><p>Two <b>and</b> three.</p>{code}"
    assert html_paragraphs(f"{page}<div>Four.</div></body>") == ["One.", "Two and three.", "Four."]


@pytest.mark.parametrize("name", ["scrpt", "srcipt", "stle", "tsyle", ""])
@pytest.mark.parametrize(
    "behind", ["{}<br>\n", "<ol><li>{}</ol>", "<dl><dd>{}</dl>", "<tr><td>{}", "<section>{}<hr>"]
    + ["<pre>{}</pre>", "<article><header>{}<br>"],
)  # fmt: skip
def test_what_follows_a_damaged_end_of_a_program_is_kept(name: str, behind: str) -> None:
    element, end = "style" if name[1:2] in "ts" else "script", f"</{name}>" if name else "<br>"
    page = f"<body><p>One.</p><{element}>a {{ b }}{end}\n{behind.format('Two.')}</body>"
    assert html_paragraphs(page)[:2] == ["One.", "Two."]


@pytest.mark.parametrize("name", ["script", "style"])
def test_an_element_that_a_text_names_takes_no_words_along(name: str) -> None:
    page = f"<p>Of the <{name}> element.</p><p>More; of it.</p>"
    assert html_paragraphs(page) == ["Of the", "element.", "More; of it."]


@pytest.mark.parametrize("doctype", ["", "<!DOCTYPE html>\n", "\ufeff<!DOCTYPE html>"])
@pytest.mark.parametrize("name", ["script", "iframe", "textarea", "title"])
def test_a_page_is_xhtml_by_its_name_space_too(doctype: str, name: str) -> None:
    page = (
        f'{doctype}<html lang="en" xmlns="http://www.w3.org/1999/xhtml">'
        f'<p>One.</p><{name} src="a"/>'
        f"<p>Two.</p><{name}></{name}><p>Three.</p></html>"
    )
    assert html_paragraphs(page) == ["One.", "Two.", "Three."]


@pytest.mark.parametrize("head", ["<title/>", '<script src="a.js"/>', "<style/><nav/><svg/>"])
def test_elements_of_xhtml_that_end_in_their_tag_hold_nothing(head: str) -> None:
    page = f'<?xml version="1.0"?><html>{head}<p>One.</p><p><![CDATA[Two <3.]]></p></html>'
    assert html_paragraphs(page) == ["One.", "Two <3."]


LONG = "A" * 20_000


@pytest.mark.parametrize(
    "page",
    [
        f'<p>One.<img alt="where x <y holds" src="data:image/png;base64,{LONG}">Two.',
        f"<p>One.<!-- <img src='data:{LONG}' -->Two.",
        f"<p>One.<!-- <a {'b=c ' * 2000} -->Two.",
        f"<p>One.<script>if (x <y {'b c ' * 2000}</script>Two.",
        f"<p>One.<script {'b=c ' * 2000}>code</script>Two.",
        f"<p>One.<span {'b=c ' * 2000}>Two.</span>",
    ],
)
def test_a_tag_of_very_many_attributes_costs_these_alone(page: str) -> None:
    assert " ".join(html_paragraphs(page)).replace(" ", "") == "One.Two."


def test_words_of_cdata_are_no_tags() -> None:
    words = "x <y holds. " * 2000
    page = f'<?xml version="1.0"?><html><!-- <![CDATA[ --><p>One.</p><p><![CDATA[{words}]]></p>'
    assert html_paragraphs(page) == ["One.", words.strip()]


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("<div><nav>a <main><p>One.</p></main></div><p>Two.", ["a", "One.", "Two."]),
        ("<article><aside><p>a</p> <p>One.</p></article><p>Two.", ["a", "One.", "Two."]),
        ("<button>a <p>One.</p> <button>b</button> <p>Two.", ["a", "One.", "Two."]),
        ("<div><nav>a <a>b</a></div><p>One.</p><nav><p>c</p></nav>", ["a b", "One."]),
        ("<div><aside>x</div>One.<pre class=code><b>x</pre>Two.", ["x", "One.", "Two."]),
        ("<button>x<button>y</button>One.", ["x", "One."]),
        ("<div><select><option>a</option> <p>One.</p> <select><option>b</select>", ["a", "One."]),
        ("<div><nav>a<br><br>One.<br>Two.</div><li>Three.", ["a", "One.", "Two.", "Three."]),
        ("<ul><aside>a <li>One.</li></ul><blockquote>Two.", ["a", "One.", "Two."]),
        ("<title>a<p>One.<svg><title>b</title></svg><p>Two.", ["a", "One.", "Two."]),
        ("<nav>x<title>a</nav><p>One.<title>b</title><p>Two.", ["One.", "Two."]),
        ("<p>One.<iframe>a<p>Two.<iframe>b</iframe><p>Three.", ["One.", "a", "Two.", "Three."]),
        ("<p>One.<style>a<p>Two.<style>b</style><p>Three.", ["One.", "Three."]),
    ],
)
def test_what_has_lost_its_end_takes_nothing_with_it(page: str, shown: list[str]) -> None:
    assert html_paragraphs(page) == shown


def test_many_parts_of_one_element_that_have_lost_their_ends_are_read() -> None:
    page = "".join(f"<h2>Part {n}</h2><aside>Note {n}</aside>" for n in range(300))
    shown = html_paragraphs(f"<div>{page.replace('</aside>', '')}</div><nav>a</nav>")
    assert shown == [f"{what} {n}" for n in range(300) for what in ("Part", "Note")]
    assert html_paragraphs(f"<div>{page}</div>") == shown[::2]


@pytest.mark.parametrize("anchor", ["", "<a name=top>", '<a id="top"/>', "<a href=x>"])
@pytest.mark.parametrize("lost", [True, False])
def test_what_a_role_leaves_out_takes_no_page_with_it(lost: bool, anchor: str) -> None:
    """Where an end tag within is lost, another's stands for its own."""
    menu = f"<div role=navigation><div><a>Home</a>{anchor}" + "</div>" * (1 if lost else 2)
    prose = "".join(f"<li>Words of {n}, which are read.</li>" for n in range(20))
    shown = html_paragraphs(f"<body><div>{menu}{prose}</div>More.</body>")
    assert shown[-21:] == [f"Words of {n}, which are read." for n in range(20)] + ["More."]
    assert shown[:-21] == (["Home"] if lost else [])


@pytest.mark.parametrize("lost", ["", "<", "?", "\n", " \u00e9"])
def test_an_end_tag_that_lost_its_end_takes_no_other_with_it(lost: str) -> None:
    menu = f"<div role=navigation><a>Home</a> <a>More</a{lost}</div>"
    prose = "".join(f"<p>Words of {n}, which are read.</p>" for n in range(20))
    assert html_paragraphs(f"<body><div>{menu}{prose}</div>More.</body>") == [
        *(f"Words of {n}, which are read." for n in range(20)), "More."
    ]  # fmt: skip
    shown = html_paragraphs(f"<p>One <b>word</b{lost} and more.<p>Two.")
    assert shown[-1] == "Two." and shown[-2].endswith("and more.")


def test_menus_stay_left_out_of_a_page_that_lost_another_end() -> None:
    links = "".join(f"<a>Page {n} of many that there are</a>" for n in range(50))
    page = (
        f"<div><div>One.</div><div role=navigation>All: {links}</div><p>Two.</p><pre><code>x</pre>"
    )
    assert html_paragraphs(page) == ["One.", "Two."]


@pytest.mark.parametrize(
    "unit", ["<div><nav><p>", "<button><p>", "<div><aside><p></div>", "<aside><p>"]
)
@pytest.mark.parametrize("end", ["", "</div>", "</nav></div>"])
def test_lost_ends_in_each_other_cost_no_square(unit: str, end: str) -> None:
    assert not html_paragraphs("<div>" + unit * 10_000 + end * 10_000)


def test_a_page_nested_without_end_is_read() -> None:
    assert html_paragraphs("<p>Words." + "<div>" * 300_000 + "More.") == ["Words.", "More."]


@pytest.mark.parametrize(
    "begin",
    ["", "<!-->", "<!--->", "<!-- x --!>", "<title/>", "<script src=x />", "<iframe><!--</iframe>"]
    + [
        '<?xml version="1.0"?><![CDATA[',
        "<a b='",
        '<a b="',
        "<script><!--",
        "<nav><button>",
        "<!--<script></script>-->",
    ],
)
@pytest.mark.parametrize(
    "unit",
    ["a{}=1 ", "<script><!--</script>", "<p a='>", '<a b="><a " ', "<nav>", "<x role=search>"]
    + ["<b c={}><p>", "<svg><p>", "<pre></pre>", "<script><!--<script></script>", "<title>", "</"]
    + ["<script><!--<script></script>--><p>a</p>", "<script>x</p>", "<style>{{", "<style>;</x"],
)
def test_a_page_of_html_takes_no_more_than_its_length(begin: str, unit: str) -> None:
    # Most of these cost minutes where each looks through what follows, or makes copies.
    page = begin + "<p " * ("=" in unit) + "".join(unit.format(n) for n in range(10_000))
    page += "<!--<script></script>-->"
    assert len("".join(html_paragraphs(page))) <= len(page)
