"""Jinja's sandbox with bounds: what a chat template can take of time and memory.

Jinja bounds what a template reaches, not what it costs, and a thread that runs one cannot be
stopped from outside. So templates are compiled with a count of their steps, and whatever makes a
text, a list or a number larger than its parts is measured before it is done. Imported by
``chat_template`` alone and only when there is a template, for the sake of quick commands.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trioserve.text.template_limits import Limits, Stopped

CHARS_PER_STEP = 64  # a step moves about so many characters in the time it takes
ITEM_SIZE = 16  # what an item of a list counts beside what is in it; about as in memory
MAX_NUMBER_BITS = 16 * 1024
MAX_NUMBER_CHARS = 4096
MAX_FORM_CHARS = 1024  # of a form of dates, and of names of attributes
MAX_INDENT = 100
CLOCK_STEPS = 16  # between two looks at the clock; a step may take a hundredth of a second
# In a form of texts: a width of six digits, or one that is an argument.
PERCENT_WIDTH = re.compile(r"%[^%a-zA-Z]*(\d{6}|\*)")
BRACE_WIDTH = re.compile(r"\{[^{}]*:[^{}]*\d{6}|\{[^{}]*\{")
CONTAINERS = (list, tuple, dict, set, frozenset)
# Of no use in a prompt, and of a cost that nothing here bounds.
DROPPED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap")
SEARCHES = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip")

T = TypeVar("T")


class _Meter:
    """What one rendering has taken so far. Used by the one thread that renders."""

    def __init__(self, limits: Limits, cpu_clock: Callable[[], float]) -> None:
        self.limits = limits
        self.steps_left = limits.steps
        self._look_at = limits.steps - CLOCK_STEPS
        self._clock = cpu_clock
        self._deadline: float | None = None  # the first look sets it
        # Sizes of containers by id. They never change, so that each is measured once; they are
        # kept, so that no other gets their id.
        self._sizes: dict[int, tuple[Any, int]] = {}

    def tick(self, num_chars: int = 0) -> None:
        """One step, and the characters it makes. Raises Stopped."""
        self.steps_left -= 1 + num_chars // CHARS_PER_STEP
        if self.steps_left < self._look_at:
            self._look()

    def _look(self) -> None:
        self._look_at = self.steps_left - CLOCK_STEPS
        if self.steps_left < 0:
            raise Stopped(f"it took over {self.limits.steps} steps, as one without an end does")
        now = self._clock()
        if self._deadline is None:
            self._deadline = now + self.limits.cpu_s
        if now > self._deadline:
            raise Stopped(f"it took over {self.limits.cpu_s:g} s of processor time")

    def size_of(self, value: Any) -> int:
        """About how many characters ``value`` is as a text."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return ITEM_SIZE + value.bit_length() // 3
        if not isinstance(value, CONTAINERS):
            return ITEM_SIZE
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        size = ITEM_SIZE + sum(ITEM_SIZE + self.size_of(item) for item in value)
        if isinstance(value, dict):
            size += sum(map(self.size_of, value.values()))
        self._sizes[id(value)] = value, size
        return size

    def check(self, size: int) -> None:
        """Before something of this size is made. Raises Stopped."""
        if size > self.limits.size:
            raise Stopped(f"it made a text or list of over {self.limits.size} characters")

    def made(self, value: Any) -> Any:
        """Count what was made, and return it. Raises Stopped."""
        size = self.size_of(value)
        self.check(size)
        self.tick(size)
        return value


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that count their steps. They are made and run by ``metered``.

    Args:
        cpu_clock: seconds of processor time of the present thread.
    """

    intercepted_binops = frozenset(("-", "*", "/", "//", "**", "%"))

    def __init__(self, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self.code_generator_class = _CodeGenerator
        self._clock = cpu_clock
        self._local = threading.local()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=self._shown,
        )
        del self.globals["lipsum"]
        self.globals["namespace"] = _Names
        for name in DROPPED_FILTERS:
            del self.filters[name]
        self.filters.update(
            {name: self.metered_filter(name, f) for name, f in self.filters.items()}
        )

    def metered(self, work: Callable[[], T], limits: Limits) -> T:
        """Call ``work``, which compiles or renders one template, in these limits."""
        self._local.meter = _Meter(limits, self._clock)
        try:
            return work()
        finally:
            del self._local.meter

    # --------------------------------------------------- what compiled templates call

    def tick(self) -> None:
        """A block of the template begins."""
        self._local.meter.tick()

    def made(self, value: Any) -> Any:
        """A list, tuple or dict was written."""
        return self._local.meter.made(value)

    def joined(self, items: tuple[Any, ...]) -> str:
        """``~``"""
        meter = self._local.meter
        meter.check(sum(map(meter.size_of, items)))
        return str(meter.made("".join(map(str, items))))

    def added(self, left: Any, right: Any) -> Any:
        """``+`` of two values of which none is a constant."""
        meter = self._local.meter
        if isinstance(left, int | float):
            return left + right
        if type(left) is type(right) is str:
            size = len(left) + len(right)
            meter.check(size)
            meter.tick(size)
            return left + right
        meter.check(meter.size_of(left) + meter.size_of(right))
        return meter.made(left + right)

    def concat(self, pieces: Iterable[str]) -> str:
        """The output of a template, a macro or a block."""
        meter, kept, size = self._local.meter, [], 0
        for piece in pieces:
            size += len(piece)
            if size > meter.limits.size:
                meter.check(size)
            kept.append(piece)
        meter.tick(size)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """All operators but ``+`` and ``~``."""
        meter = self._local.meter
        if operator == "%" and isinstance(left, str):
            _check_percent(left, meter, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if bits > MAX_NUMBER_BITS or right.bit_length() > MAX_NUMBER_BITS:
                raise Stopped(f"it made a number of over {MAX_NUMBER_BITS} bits")
        elif operator == "*":
            number, other = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(number, int) and not isinstance(other, float):
                meter.check(number * meter.size_of(other))
        return meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of a method, a macro or a function."""
        meter = __self._local.meter
        given = (*args, *kwargs.values())
        if any(isinstance(value, CONTAINERS) for value in given):
            meter.check(sum(map(meter.size_of, given)))  # what a macro's varargs are
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja's own str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = _check_method(method.__name__, owner, args, kwargs, meter)
        elif isinstance(owner, int | float | bytes):
            raise Stopped(f"it called {method.__name__} of a number or of bytes")
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def _shown(self, value: Any) -> Any:
        """What is about to become output."""
        if not isinstance(value, str):
            meter = self._local.meter
            meter.tick(meter.size_of(value))
        return value

    def metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        at = int(hasattr(function, "jinja_pass_arg"))  # where the value is
        check = _FILTERS.get(name)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            meter = self._local.meter
            if len(args) > at and hasattr(args[at], "__next__"):
                items = _counted(args[at], meter)
                args = (*args[:at], list(items) if name == "join" else items, *args[at + 1 :])
            if check is not None:
                check(meter, *args[at:], **kwargs)
            return meter.made(function(*args, **kwargs))

        return run


class _CodeGenerator(CodeGenerator):
    """Writes Python that counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inner_adds: dict[int, nodes.Node] = {}  # by id; their sums are looked at further out

    def blockvisit(self, body: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.tick()")
        super().blockvisit(body, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        # With a constant a text grows by no more than the template's own length, until it is looked
        # at: that is done once for a row of sums.
        grows = not isinstance(node.left, nodes.Const) and not isinstance(node.right, nodes.Const)
        looks = id(node) not in self._inner_adds
        if not grows and isinstance(node.left, nodes.Add):
            self._inner_adds[id(node.left)] = node.left
        self.write("environment.added(" if grows else "environment.made(" if looks else "(")
        self.visit(node.left, frame)
        self.write(", " if grows else " + ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._container(super().visit_List, node, node.items, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._container(super().visit_Tuple, node, node.items, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        values = [part for pair in node.items for part in (pair.key, pair.value)]
        self._container(super().visit_Dict, node, values, frame)

    def _container(
        self, visit: Callable[[Any, Frame], None], node: Any, parts: list[nodes.Expr], frame: Frame
    ) -> None:
        if all(isinstance(part, nodes.Const) for part in parts):
            visit(node, frame)
            return
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it is nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own protocol)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Names(Namespace):
    """``namespace``. Jinja's own shows all it holds, which others may hold as well, and so on."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _counted(items: Iterator[Any], meter: _Meter) -> Iterator[Any]:
    """What comes out of a filter one by one, so that a list of it does not grow unseen."""
    size = 0
    for item in items:
        size += ITEM_SIZE + meter.size_of(item)
        meter.check(size)
        meter.tick()
        yield item


def _check_method(
    name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any], meter: _Meter
) -> tuple[Any, ...]:
    """Before a method of a text is called; the arguments to call it with. Raises Stopped."""
    if name in SEARCHES and args and isinstance(args[0], str):
        meter.tick(len(text) * len(args[0]) // 16)  # these look at each pair of characters
    match name, args:
        case "join", (items,):
            items = list(_counted(iter(items), meter))
            meter.check(meter.size_of(items) + len(items) * len(text))
            return (items,)
        case "replace", (str(old), str(new), *_):
            meter.check(len(text) + text.count(old) * len(new))
        case "center" | "ljust" | "rjust" | "zfill", (int(width), *_):
            meter.check(width)
        case "expandtabs", _:
            width = args[0] if args else kwargs.get("tabsize", 8)
            meter.check(len(text) + text.count("\t") * int(width))
        case "split" | "rsplit" | "splitlines", _:
            mark = args[0] if args else kwargs.get("sep")
            num_parts = text.count(mark) if isinstance(mark, str) and mark else len(text) // 2
            meter.check(len(text) + num_parts * ITEM_SIZE // 4)
        case "format", _:
            _check_braces(text, meter, (*args, *kwargs.values()))
        case "encode" | "format_map" | "maketrans" | "translate", _:
            raise Stopped(f"it called {name}, which is not to be had here")
    return args


def _check_percent(form: str, meter: _Meter, values: Any) -> None:
    """Before ``form % values``. Raises Stopped."""
    _check_form(form.replace("%%", ""), "%", PERCENT_WIDTH, meter, values)


def _check_braces(form: str, meter: _Meter, values: tuple[Any, ...]) -> None:
    """Before ``form.format(*values)``. Raises Stopped."""
    _check_form(form.replace("{{", ""), "{", BRACE_WIDTH, meter, values)


def _check_form(form: str, mark: str, width: re.Pattern[str], meter: _Meter, values: Any) -> None:
    if width.search(form):
        raise Stopped("it asks for a width of over 99999, or for one by an argument")
    num_values = len(values) if isinstance(values, tuple) else 1
    num_repeated = max(1, form.count(mark) - num_values + 1)
    meter.check(len(form) + num_repeated * meter.size_of(values))


# ------------------------------------------------------------------------------- filters


def _center(meter: _Meter, text: Any, width: int = 80) -> None:
    meter.check(int(width))


def _indent(meter: _Meter, text: Any, width: Any = 4, *args: Any, **kwargs: Any) -> None:
    size = len(width) if isinstance(width, str) else int(width)
    meter.check(len(str(text)) + (str(text).count("\n") + 1) * size)


def _replace(meter: _Meter, text: Any, old: Any, new: Any, count: Any = None) -> None:
    meter.check(len(str(text)) + str(text).count(str(old)) * len(str(new)))


def _join(meter: _Meter, items: Any, by: Any = "", attribute: Any = None) -> None:
    _names(meter, items, attribute)
    meter.check(len(items) * len(str(by)) + meter.size_of(items))


def _format(meter: _Meter, form: Any, *args: Any, **kwargs: Any) -> None:
    _check_percent(str(form), meter, kwargs or args)


def _parts(meter: _Meter, items: Any, num: int, fill_with: Any = None) -> None:
    meter.check(int(num) * (ITEM_SIZE + meter.size_of(fill_with)))


def _round(meter: _Meter, number: Any, precision: int = 0, method: str = "common") -> None:
    if int(precision) > 100:
        raise Stopped("it rounds to over 100 digits")


def _sum(meter: _Meter, items: Any, attribute: Any = None, start: Any = 0) -> None:
    _names(meter, items, attribute)
    if not isinstance(start, int | float):
        raise Stopped("it adds up what are no numbers")


def _list(meter: _Meter, items: Any) -> None:
    if hasattr(items, "__len__"):
        meter.check(len(items) * ITEM_SIZE // 4)


def _words(meter: _Meter, text: Any) -> None:
    size = len(text) if isinstance(text, str) else 0
    meter.check(size * ITEM_SIZE // 4)
    meter.tick(size * ITEM_SIZE // 2)  # each word becomes a text of its own


def _int(meter: _Meter, text: Any, default: Any = 0, base: Any = 10) -> None:
    if isinstance(text, str) and len(text) > MAX_NUMBER_CHARS:
        raise Stopped(f"it reads a number of over {MAX_NUMBER_CHARS} digits")


def _trim(meter: _Meter, text: Any, chars: Any = None) -> None:
    if isinstance(text, str) and isinstance(chars, str):
        meter.tick(len(text) * len(chars) // 16)


def _tojson(
    meter: _Meter,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > MAX_INDENT or (separators and sum(map(len, separators)) > MAX_INDENT):
        raise Stopped(f"it indents or separates by over {MAX_INDENT} characters")


def _names(meter: _Meter, items: Any, *args: Any, **kwargs: Any) -> None:
    for name in (*args, *kwargs.values()):
        if isinstance(name, str) and len(name) > MAX_FORM_CHARS:
            raise Stopped(f"it names an attribute by over {MAX_FORM_CHARS} characters")


def _first_name(meter: _Meter, items: Any, name: Any = "", *args: Any, **kwargs: Any) -> None:
    _names(meter, items, name)


def _map(meter: _Meter, items: Any, *args: Any, **kwargs: Any) -> None:
    _names(meter, items, kwargs.get("attribute"))


_FILTERS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("attr", "groupby", "max", "min", "sort", "unique"), _names),
    **dict.fromkeys(("rejectattr", "selectattr"), _first_name),
    "batch": _parts,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "list": _list,
    "map": _map,
    "replace": _replace,
    "round": _round,
    "slice": _parts,
    "sum": _sum,
    "tojson": _tojson,
    "title": _words,
    "trim": _trim,
    "wordcount": _words,
}
