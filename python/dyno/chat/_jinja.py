"""The Jinja2 environment that renders chat templates like the reference implementation of model makers.

Output equals that of the public reference: blocks are trimmed, loops have `break` and `continue`, `tojson`
keeps every character, and templates may call `raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Any

from jinja2 import nodes, pass_environment
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dyno.chat._origin import joined, own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jinja2 import Environment, Template
    from jinja2.compiler import Frame
    from jinja2.parser import Parser

__all__ = ["ChatEnvironment", "Refused", "render"]


class Refused(TemplateError):
    """The error of a template that refused the messages with `raise_exception`."""


class _OriginGenerator(CodeGenerator):
    """A code generator whose string constants carry the mark that the template wrote them."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(f"environment.own({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.own({node.data!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({''.join(group)!r})"


class _Generation(Extension):
    """The tag `{% generation %}`, which marks answers for training. Here, only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # The block has its own scope, as in the reference: variables that are set inside are not visible
        # outside.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A sandboxed environment: templates can neither reach Python's internals nor change their arguments."""

    code_generator_class = _OriginGenerator
    concat = staticmethod(joined)
    own = staticmethod(own)

    def __init__(self) -> None:
        # Without the optimizer, which would fold strings into constants that lose the mark of their origin.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.filters["join"] = _join
        self.globals["raise_exception"] = _raise_exception


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return joined(value, str(d))


def _raise_exception(message: str) -> None:
    raise Refused(str(message))


def render(template: Template, variables: dict[str, Any], now: datetime.datetime | None) -> str:
    """The prompt; `strftime_now` reads `now`, or the clock if it is None."""

    def strftime_now(form: str) -> str:
        return (now or datetime.datetime.now()).strftime(form)

    return template.render({**variables, "strftime_now": strftime_now})
