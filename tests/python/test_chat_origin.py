"""Random templates: the text is that of plain Jinja2, and foreign text never counts as the template's own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from dyno.chat._jinja import ChatEnvironment
from dyno.chat._origin import spans_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

OURS, THEIRS = "ab<|>", "αβγ \n#"  # letters of the template and of messages: no text has both

constants = st.text(OURS, max_size=4).map(repr)
names = st.sampled_from(["x", "y", "m.content", "m['role']", "xs[0]", "d.k"])
numbers = st.integers(-3, 3).map(str)


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Expressions made of smaller ones."""

    def call(form: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.tuples(*parts).map(lambda values: form.format(*values))

    filters = st.sampled_from(
        [
            *("trim", "upper", "lower", "title", "capitalize", "string", "safe", "tojson", "reverse", "e"),
            *(
                "replace('a', '<')",
                "replace('α', '|')",
                "replace('', '-')",
                "indent(1)",
                "list",
                "first",
                "last",
            ),
            *(
                "join('<')",
                "join(x)",
                "default(x)",
                "center(9)",
                "truncate(3)",
                "wordwrap(2)",
                "escape",
                "length",
            ),
            *(
                "format(1)",
                "batch(2) | list",
                "map('upper') | join",
                "unique | join('a')",
                "urlize",
                "striptags",
            ),
        ]
    )
    methods = st.sampled_from(
        [
            *(
                "strip()",
                "strip('a')",
                "lstrip('α')",
                "rstrip()",
                "upper()",
                "lower()",
                "title()",
                "swapcase()",
            ),
            *(
                "split()[0]",
                "split('a')[-1]",
                "split(x)|join",
                "rsplit('<', 1)[-1]",
                "splitlines()|join('|')",
            ),
            *("partition('a')|join(x)", "rpartition(x)[0]", "replace(x, 'b')", "replace('a', y, 1)"),
            *("removeprefix('a')", "removesuffix(x)", "join(['a', x, y])", "join(xs)", "format(x, y)"),
            *(
                "ljust(5)",
                "zfill(6)",
                "casefold()",
                "expandtabs()",
                "encode()",
                "capitalize()",
                "center(7, 'a')",
            ),
        ]
    )
    return st.one_of(
        call("({} + {})", inner, inner),
        call("({} ~ {})", inner, inner),
        call("({} * {})", inner, numbers),
        call("({} % {})", inner, inner),
        call("({})[{}:{}]", inner, numbers, numbers),
        call("({})[::{}]", inner, numbers),
        call("({})[{}]", inner, numbers),
        call("({} if {} else {})", inner, inner, inner),
        call("({} | {})", inner, filters),
        call("({}).{}", inner, methods),
        call("('{{}}a{{}}'.format({}, {}))", inner, inner),
        call("('%s<%s' % ({}, {}))", inner, inner),
        call("[{}, {}] | join({})", inner, inner, inner),
        call("w({})", inner),
    )


expressions = st.recursive(st.one_of(constants, names), combined, max_leaves=8)
statements = st.one_of(
    st.text(OURS.replace("<", ""), max_size=3),
    expressions.map(lambda e: "{{ " + e + " }}"),
    expressions.map(lambda e: "{% set s %}a{{ " + e + " }}{% endset %}{{ s }}{{ s ~ 'b' }}"),
    expressions.map(lambda e: "{% for c in " + e + " %}{{ c }}{{ loop.cycle('a', x) }}{% endfor %}"),
    expressions.map(lambda e: "{% filter upper %}b{{ " + e + " }}{% endfilter %}"),
    expressions.map(lambda e: "{% set n = namespace(v='') %}{% set n.v = n.v + " + e + " %}{{ n.v }}"),
    expressions.map(lambda e: "{% call w('a') %}b{{ " + e + " }}{% endcall %}"),
)
templates = st.lists(statements, max_size=3).map(
    lambda parts: "{% macro w(v) %}<{{ v }}{{ caller() if caller else '' }}>{% endmacro %}" + "".join(parts)
)
foreign = st.text(THEIRS, max_size=6)


def rendered(environment: Any, template: str, variables: dict[str, Any]) -> str | None:
    try:
        text: str = environment.from_string(template).render(**variables)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, OverflowError):
        return None
    return text


# Of a template that takes a part of a number, which fails in both environments when it is rendered.
@pytest.mark.filterwarnings("ignore:'.*' object is not subscriptable:SyntaxWarning")
@settings(max_examples=400, deadline=None)
@example(template="{{ ('' + (('' | length))[::0]) }}", x="", y="")
@example(template="{{ ('<<' | list) }}", x="", y="")
@given(template=templates, x=foreign, y=foreign)
def test_no_foreign_character_counts_as_the_templates(template: str, x: str, y: str) -> None:
    variables = {"x": x, "y": y, "xs": [x, y], "d": {"k": y}, "m": {"role": x, "content": x + y}}
    found = rendered(ChatEnvironment(), template, variables)
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    plain.filters["tojson"] = ChatEnvironment().filters["tojson"]
    assert found == rendered(plain, template, variables)
    if found is None:
        return
    spans = spans_of(found)
    assert all(0 <= begin < end <= len(found) for begin, end in spans)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(spans))
    taken = "".join(found[begin:end] for begin, end in spans)
    # The template's own blanks: that filter pads with them, and a list is printed with one after each comma.
    blank = "" if "center" in template or "list" in template else " "
    assert not set(taken) & set("αβγΑΒΓ#" + blank), (found, spans)
