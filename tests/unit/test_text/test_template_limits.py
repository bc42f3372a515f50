"""Chat templates that take too much are stopped; what they take is counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trioserve.errors import InvalidRequest
from trioserve.text.chat_template import ChatTemplate, TemplateStopped
from trioserve.text.template_limits import Limits

USER = {"role": "user", "content": "Hi there, hello"}
FEW = Limits(steps=20_000, size=100_000)
DOUBLE = "{% set ns = namespace(x='abc') %}{% for i in range(60) %}"

ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "branches": "{% for a in range(99999) %}{% if a %}{% else %}{% endif %}{% endfor %}",
    "recursive loop": "{% for a in [1] recursive %}" + "{{ loop([1, 1]) }}" + "{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "filters": "{% set f = range(99999) %}{{ f | map('string') | map('upper') | list | length }}",
    "filters one by one": "{{ range(99999) | map('center', 90000) | list | length }}",
    "select": "{% for a in range(999) %}{{ range(9999) | select('odd') | list | length }}"
    "{% endfor %}",
    "many texts": "{% set x %}{% for a in range(9999) %}{{ a | center(90000) }}{% endfor %}"
    "{% endset %}",
    "plus a constant": "{% set ns = namespace(x='') %}{% for i in range(900) %}"
    "{% set ns.x = ns.x + '" + "x" * 999 + "' %}{% endfor %}",
    "plus constants": "{% set ns = namespace(x='') %}{% for i in range(900) %}"
    "{% set ns.x = 'a' + ns.x + '" + "x" * 999 + "' + 'b' %}{% endfor %}",
    "many blocks": "{% set t = 'x' * 90000 %}{% set z %}{% for i in range(500) %}{% set y %}{{ t }}"
    "{% endset %}{% if y %}{% endif %}{% endfor %}{% endset %}",
    "many lists shown": "{% set l = range(9000) | list %}{% macro m() %}{% for a in range(9999) %}"
    "{{ l }}{% endfor %}{% endmacro %}{{ m() | length }}",
}
LARGE = {
    "output": "{% for a in range(9999) %}{{ 'x' * 1000 }}{% endfor %}",
    "times": "{{ ('x' * 99999) * 99999999 }}",
    "times from the left": "{{ 99999999999 * 'xy' }}",
    "list times": "{{ ([1, 2] * 9999999) | length }}",
    "plus": DOUBLE + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "plus of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "tilde": DOUBLE + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "block": DOUBLE + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "nested lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == 1 }}",
    "nested tuples": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    "nested dicts": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}",
    "nested calls of dict": "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
    "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "varargs": "{% macro m(n) %}{% if n %}{{ caller_of(varargs) }}{{ m(n - 1, varargs, varargs) }}"
    "{% endif %}{% endmacro %}{% macro caller_of(x) %}{% endmacro %}{{ m(60, 1) }}",
    "fromkeys": "{% set t = 'x' * 900 %}{{ {}.fromkeys(range(9999), t) | length }}",
    "batch": "{{ [1] | batch(999999999, 'x') | list | length }}",
    "slice": "{{ [1] | slice(999999999) | list | length }}",
    "list of a text": "{{ ('x' * 90000) | list | length }}",
    "center": "{{ 'x' | center(999999999) }}",
    "center folded": "{{ 'x' | center(999999999) | length }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "zfill": "{{ 'x'.zfill(999999999) }}",
    "expandtabs": "{{ ('\t' * 99).expandtabs(99999999) }}",
    "replace": "{{ ('x' * 9999).replace('x', 'y' * 9999) }}",
    "replace nothing": "{{ ('x' * 9999).replace('', 'y' * 9999) }}",
    "replace filter": "{{ ('x' * 9999) | replace('x', 'y' * 9999) }}",
    "join": "{{ ('y' * 9999).join(['a'] * 999) }}",
    "join filter": "{{ (['a'] * 999) | join('y' * 9999) }}",
    "join what comes": "{{ range(9999) | map('center', 999) | join }}",
    "title": "{{ ('ab ' * 9999) | title | length }}",
    "wordcount": "{{ ('ab ' * 9999) | wordcount }}",
    "indent": "{{ ('a\n' * 999) | indent(99999) }}",
    "split": "{{ ('a,' * 40000).split(',') | length }}",
}
REFUSED = {
    "power": "{{ 10 ** 99999999 }}",
    "power of numbers": "{{ messages | length ** 99999999 }}",
    "power step by step": "{% set ns = namespace(x=9) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "width": "{{ '%999999999d' % 1 }}",
    "width as an argument": "{{ '%*d' % (999999999, 1) }}",
    "width in format": "{{ '{:999999999}'.format(1) }}",
    "width of format as an argument": "{{ '{:{}}'.format(1, 999999999) }}",
    "width in the filter": "{{ '%999999999d' | format(1) }}",
    "bytes": "{{ (5).to_bytes(999999999, 'big') | length }}",
    "json indented": "{{ messages | tojson(indent=999999999) }}",
    "json separated": "{{ messages | tojson(separators=('x' * 999, ':')) }}",
    "a number in many digits": "{{ ('f' * 9999) | int(0, 16) }}",
    "attribute": "{{ messages | map(attribute='a.' * 9999) | list }}",
    "attribute to sort by": "{{ messages | sort('a.' * 9999) }}",
    "attribute to select by": "{{ messages | selectattr('a.' * 9999) | list }}",
    "encode": "{{ 'x'.encode('punycode') }}",
    "strip of very many": "{{ ('x' * 90000).strip('y' * 90000) }}",
    "search from the right": "{{ ('x' * 90000).rfind('y' ~ 'x' * 90000) }}",
    "trim of very many": "{{ ('x' * 90000) | trim('y' * 90000) }}",
    "translate": "{{ 'x'.translate({120: 'y' * 9999}) }}",
    "sum of lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "round": "{{ 1.5 | round(999999999, 'floor') }}",
}


def stopped_by(source: str, limits: Limits = FEW, **variables: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source).render([USER], limits, **variables)
    assert caught.value.param == "messages"
    return caught.value.message


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_what_has_no_end_is_stopped(source: str) -> None:
    message = stopped_by(source)
    assert "stopped: it " in message or "RecursionError" in message


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE.keys())
def test_what_grows_is_stopped_before_it_is_large(source: str) -> None:
    assert "stopped: it made a text or list of over 100000 characters" in stopped_by(source)


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED.keys())
def test_what_would_hold_up_everything_is_refused(source: str) -> None:
    assert "the chat template was stopped: it " in stopped_by(source)


def test_default_limits_end_what_has_no_end() -> None:
    with pytest.raises(TemplateStopped, match="4000000 steps"):
        ChatTemplate(ENDLESS["loops"]).render([USER])


def test_processor_time_is_bounded() -> None:
    def clock() -> float:
        return next(seconds)

    seconds: Iterator[float] = iter([100.0, 101.0, 105.5])  # looked at
    template = ChatTemplate("{% for a in range(9999) %}{% endfor %}", cpu_clock=clock)
    with pytest.raises(TemplateStopped, match=r"over 5 s of processor time"):
        template.render([USER])


@pytest.mark.parametrize("by", ["// 3", "- 1", "* 1", "% 7"])
def test_numbers_that_grew_by_adding_are_refused(by: str) -> None:
    grown = "{% set ns = namespace(x=1) %}{% for i in range(17000) %}{% set ns.x = ns.x + ns.x %}"
    message = stopped_by(grown + "{% endfor %}{{ ns.x " + by + " }}", Limits())
    assert "number of over 16384 bits" in message


def test_names_show_nothing_of_what_they_hold() -> None:
    source = "{% set a = namespace(x=1) %}{% set b = namespace(x=a, y=a) %}{{ b }}"
    assert ChatTemplate(source).render([USER]) == "<Namespace>"


def test_each_rendering_is_counted_by_itself() -> None:
    template = ChatTemplate("{% for a in range(15000) %}{% endfor %}ok")
    for _ in range(5):
        assert template.render([USER], FEW) == "ok"


LEGAL = [
    "{{ 'a' ~ messages[0].content ~ 1 ~ none }}",
    "{{ 'a' + messages[0].content + 'b' + messages[0].role }}{{ 1 + 2 + 0.5 }}",
    "{{ (messages + [{'role': 'x'}]) | length }}",
    "{{ '%s is %5.2f of %d%%' % ('x', 1.25, 3) }}{{ '%(a)s' % {'a': 1} }}{{ 7 % 4 }}",
    "{{ '{0} {{}} {1:>8} {0[0]}'.format('x', 'y') }}{{ '{a}'.format(a=messages) }}",
    "{{ '%s-%s' | format('a', 1) }}",
    "{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 3 * 4 }}{{ 'ab' * 3 }}{{ 0 * 'x' }}",
    "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% endfor %}",
    "{% for a in [1, 2, 3] if a != 2 %}{{ a }}{% else %}none{% endfor %}",
    "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}",
    "{% macro m(a, b='x') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}"
    "{{ m(1, 2, 3, c=4) }}",
    "{% macro m() %}[{{ caller(1) }}]{% endmacro %}{% call(a) m() %}{{ a }}{% endcall %}",
    "{% set ns = namespace(found=false) %}{% for m in messages[::-1] %}{% set ns.found = true %}"
    "{% endfor %}{{ ns.found }}",
    "{% set x %}a{{ messages[0].content }}b{% endset %}{{ x | trim | upper | length }}{{ x }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ [1, 2] | join }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ ['b', 'a'] | sort | join('-') }}{{ [3, 1] | max }}{{ [1, 1] | unique | list }}",
    "{{ messages[0].content.split(' ')[-1].strip().replace('h', 'HH').center(20) }}",
    "{{ 'x,y'.split(',') }}",
    "{{ 'a b'.split() }}{{ ', '.join(['a', 'b']) }}{{ 'a\tb'.expandtabs(4) }}",
    "{{ 'a\nb' | indent(4) }}{{ 'a\nb' | indent('> ', true) }}{{ 'abc' | replace('b', 'xx') }}",
    "{{ [1, 2, 3] | batch(2, 'f') | list }}{{ [1, 2, 3] | slice(2) | list }}{{ [1, 2] | sum }}",
    "{{ 2.567 | round(1) }}",
    "{{ '5' | int }}{{ undefined_thing | default('d') }}{{ undefined_thing }}",
    "{{ none }}{{ true }}{{ [1, 'a', none] }}{{ {'a': [1]} }}{{ (1, 2) }}{{ 'a' in ['a', 'b'] }}",
    "{{ dict(a=1) }}{{ messages[0] | items | list }}{{ messages[0].get('x', 'y') }}{{ '<' | e }}",
    "{% for a in range(5) %}{% if a == 1 %}{% continue %}{% elif a == 3 %}{% break %}{% endif %}"
    "{{ a }}{% endfor %}",
    "{{ {'a': [1]} | tojson(indent=2) }}{{ ' a '.strip() }}{{ 'xax'.strip('x') }}",
    "{{ 'a.b'.rfind('.') }}",
    "{{ 7 - 2 }}{{ 7 / 2 }}{{ 7 // 2 }}{{ -7 }}{{ '0x1f' | int(0, 16) }}{{ 'xax' | trim('x') }}",
    "{{ messages | map(attribute='content') | list }}",
    "{{ messages | sort(attribute='role') | length }}",
    "{{ messages | groupby('role') | length }}{{ 'a b c' | wordcount }}{{ 1024 | filesizeformat }}",
    "{%- set ns = namespace(many=true, last=messages|length - 1) %}{%- for m in messages[::-1] %}"
    "{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.many and m.role == 'user' and "
    "m.content is string and not(m.content.startswith('<tool>')) %}{%- set ns.many = false %}"
    "{%- set ns.last = index %}{%- endif %}{%- endfor %}{{ ns.last }}",
    "{% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}{% set r = "
    "c.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + c.strip('\\n') + '<|im_end|>' }}{% endfor %}",
    "{%- if messages[0]['role'] == 'user' %}{%- set rest = messages[1:] %}{%- else %}"
    "{%- set rest = messages %}{%- endif %}{{ rest | length }}"
    "{%- for m in messages | rejectattr('role', 'equalto', 'tool') | selectattr('content', "
    "'defined') %}{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}",
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}bad{% endif %}"
    "{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% endfor %}",
    "{% filter upper %}abc{{ messages[0].role }}{% endfilter %}",
    "{% with y = 1 %}{{ y }}{% endwith %}",
]


@pytest.mark.parametrize("source", LEGAL)
def test_what_is_legal_is_as_jinja_has_it(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    want = plain.from_string(source).render(messages=[USER])
    assert ChatTemplate(source).render([USER]) == want
