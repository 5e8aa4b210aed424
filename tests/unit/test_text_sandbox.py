"""Chat templates that would take the process down with them: each is refused, quickly and alone."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from common.errors import InvalidRequestError
from workers.checkpoint import CheckpointError
from workers.text.chat import ChatTemplate
from workers.text.limits import TemplateLimitError, cpu_limit
from workers.text.sandbox import TemplateEnvironment

MESSAGES = [{"role": "user", "content": "hi"}]


def render(text: str) -> str:
    return TemplateEnvironment().from_string(text).render(messages=MESSAGES)


def grow(step: str, start: str = "'ab'") -> str:
    """A template that applies ``step`` to ``ns.x`` a hundred times."""
    return (
        f"{{% set ns = namespace(x={start}) %}}{{% for i in range(100) %}}{step}{{% endfor %}}{{{{ ns.x }}}}"
    )


BOMBS = {
    "repeat": "{{ 'a' * 10**10 }}",
    "repeat a list": "{{ [1] * 10**10 }}",
    "power": "{{ (10**9)**(10**9) }}",
    "product": grow("{% set ns.x = ns.x * ns.x %}", "99"),
    "center filter": "{{ 'a' | center(10**10) }}",
    "center method": "{{ 'a'.center(10**10) }}",
    "ljust": "{{ 'a'.ljust(9999999999) }}",
    "zfill": "{{ 'a'.zfill(9999999999) }}",
    "expandtabs": "{{ '\t'.expandtabs(9999999999) }}",
    "percent": "{{ '%9999999999d' % 3 }}",
    "percent star": "{{ '%*d' % (9999999999, 3) }}",
    "percent filter": "{{ '%9999999999d' | format(3) }}",
    "format": "{{ '{:9999999999}'.format(3) }}",
    "format nested": "{{ '{:{w}}'.format(3, w=9999999999) }}",
    "format_map": "{{ '{a:9999999999}'.format_map({'a': 3}) }}",
    "batch": "{{ [1] | batch(9999999999, 'x') | list }}",
    "slice": "{{ [1] | slice(9999999999) | list }}",
    "round": "{{ 1.5 | round(999999999, 'ceil') }}",
    "indent": "{{ 'a\nb' | indent(9999999999) }}",
    "indent by text": "{{ ('a\n' * 100000) | indent('b' * 1000000) }}",
    "tojson indent": "{{ [[1]] | tojson(indent=999999999) }}",
    "strftime": "{{ strftime_now('%9999999999d') }}",
    "plus": grow("{% set ns.x = ns.x + ns.x %}"),
    "plus lists": grow("{% set ns.x = ns.x + ns.x %}", "[1]"),
    "tilde": grow("{% set ns.x = ns.x ~ ns.x %}"),
    "block set": grow("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}" + grow("{% set ns.x = d(ns.x) %}"),
    "join filter": grow("{% set ns.x = [ns.x, ns.x] | join %}"),
    "join method": grow("{% set ns.x = ''.join([ns.x, ns.x]) %}"),
    "join with a long separator": "{{ ('a' * 1000000) | join('b' * 1000000) }}",
    "replace filter": grow("{% set ns.x = ns.x | replace('a', ns.x) %}"),
    "replace method": grow("{% set ns.x = ns.x.replace('a', ns.x) %}"),
    "percent of texts": grow("{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    "format of texts": grow("{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    "nested lists": grow("{% set ns.x = [ns.x, ns.x] %}"),
    "many references": "{% set x = 'a' * 1000000 %}{{ [x] * 1000000 }}",
    "many references to JSON": "{% set x = 'a' * 1000000 %}{{ ([x] * 1000000) | tojson }}",
    "many references as text": "{% set x = 'a' * 1000000 %}{{ (([x] * 1000000) | string) | length }}",
    "sum of lists": "{{ ([[1] * 100000] * 100000) | sum(start=[]) | length }}",
    "output": "{% set x = 'a' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
}


@pytest.mark.parametrize("template", BOMBS.values(), ids=BOMBS.keys())
def test_large_values_are_refused(template: str) -> None:
    start = time.process_time()
    with cpu_limit(10), pytest.raises(TemplateLimitError):
        render(template)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}{% endfor %}{{ ns.n }}",
    ],
)
def test_endless_loops_are_stopped(template: str) -> None:
    start = time.process_time()
    with pytest.raises(TemplateLimitError, match=r"0\.2 s of CPU time"), cpu_limit(0.2):
        render(template)
    assert time.process_time() - start < 2


def test_the_timer_leaves_nothing_behind() -> None:
    before = signal.getsignal(signal.SIGPROF)
    with cpu_limit(5):
        pass
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) == before


def test_the_timer_is_for_the_main_thread() -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with cpu_limit(1):
                pass
        except AssertionError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5)
    assert failed


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ (5).to_bytes(9999999999, 'big') }}", "unsafe"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        ("{{ range(10**9) }}", "OverflowError"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
    ],
)
def test_what_templates_do_wrong_is_said(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        ChatTemplate({"default": template}, {}).render(MESSAGES)
    assert caught.value.param == "messages"


def test_a_template_that_is_none() -> None:
    with pytest.raises(CheckpointError, match="not valid"):
        ChatTemplate({"default": "{% if %}"}, {})
    with pytest.raises(CheckpointError, match="No filter named 'urlize'"):
        ChatTemplate({"default": "{{ 'a' | urlize }}"}, {})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 'a' ~ 1 ~ none ~ [2] }}", "a1None[2]"),
        ("{{ 'ab' * 3 }}{{ 2**10 }}{{ [1] + [2] }}{{ '%05.1f|%s' % (2.5, 'x') }}", "ababab1024[1, 2]002.5|x"),
        ("{{ ['a', 1] | join('-') }}{{ [{'n': 'x'}] | join(', ', 'n') }}", "a-1x"),
        ("{{ 'a,b'.split(',') | join('+') }}{{ '-'.join(['a', 'b']) }}", "a+ba-b"),
        ("{{ 'aXa'.replace('a', 'bb', 1) }}{{ 'aXa' | replace('a', '', 1) }}", "bbXaXa"),
        ("{{ 'x' | indent(2, true) }}|{{ 'a\nb' | indent }}|{{ 'a' | replace('a', 'b') }}", "  x|a\n    b|b"),
        ("{{ '{:>5}'.format('a') }}{{ '{a}'.format_map({'a': 1}) }}{{ '%d' | format(3) }}", "    a13"),
        ('{{ {"b": "é<", "a": 1} | tojson }}', '{"b": "é<", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}",
         '[\n 1\n]{"a":2,"b":1}'),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a\n{% if true %}\n  b\n{% endif %}\n", "a\n  b\n"),
        ("{{ [1, 2] | sum }}{{ [[1], [2]] | sum(start=[]) }}", "3[1, 2]"),
        ("{{ 2.5 | round }}{{ 'a' | center(3) }}{{ [1, 2, 3] | batch(2) | list }}", "2.0 a [[1, 2], [3]]"),
        ("{{ strftime_now('%Y') | length }}{{ 'a' | string | upper }}{{ dict(a=1).a }}", "4A1"),
    ],
)  # fmt: skip
def test_what_templates_may_do_works_as_in_jinja(template: str, expected: str) -> None:
    assert render(template) == expected
