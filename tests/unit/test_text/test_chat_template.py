"""Chat templates: dialect, refusals, faults."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from trioserve.errors import InvalidRequest, ModelError
from trioserve.text.chat_template import ChatTemplate

CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
Be brief.<|im_end|>
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""
STRICT = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- call.function.name }}({{ call.function.arguments | tojson }})
        {%- endfor %}
    {%- endif %}
    {{- '[' ~ message.role ~ ']' ~ message.content ~ (message.name or '') ~ eos_token }}
{%- endfor %}
"""
USER = {"role": "user", "content": "Hi"}


def render(source: str, *messages: dict[str, Any], **kwargs: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(list(messages) or [USER], **kwargs)


def test_blocks_leave_no_white_space() -> None:
    assert render(CHATML) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\n"
    )
    assert render(CHATML, add_generation_prompt=False).endswith("Hi<|im_end|>\n")


def test_tokens_and_absent_tokens() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}") == "<s>|</s>"
    assert ChatTemplate("{{ bos_token }}|{{ eos_token }}").render([USER]) == "|"


def test_api_12_the_word_none_never_appears() -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": "null"}}]
    text = render(
        STRICT,
        {"role": "user", "content": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "user", "name": None, "refusal": None},
    )
    assert text == "<s>[user]</s>f({})[assistant]</s>[user]</s>"


def test_api_12_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(STRICT, USER, USER)
    assert caught.value.message == "Conversation roles must alternate user/assistant/user/..."
    assert caught.value.param == "messages"
    assert caught.value.status == 400


def test_api_12_illegal_messages_do_not_reach_the_template() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ 1 / 0 }}", {"role": "robot", "content": "x"})
    assert caught.value.param == "messages[0].role"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{{ messages[0] | items | tojson }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_api_12_faults_of_the_template_are_one_clear_line(source: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match="the model's chat template fails") as caught:
        render(source)
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source", ["a\n{% if x %}", "a\n{{ x", "a\n{% nonsense %}", "a\n{{ x | no_such_filter }}"]
)
def test_broken_templates_are_the_models_fault_with_the_line(source: str) -> None:
    with pytest.raises(ModelError, match="chat template, line 2: "):
        ChatTemplate(source)


def test_tojson_leaves_text_alone() -> None:
    source = "{{ {'b': \"<é & 'ü'>\", 'a': [1, none, true]} | tojson }}"
    assert render(source) == """{"b": "<é & 'ü'>", "a": [1, null, true]}"""
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_loop_controls_and_generation_blocks() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 4 %}{% break %}"
        "{% endif %}{% generation %}{{ i }}{% endgeneration %}{% endfor %}"
    )
    assert render(source) == "023"


def test_strftime_now_asks_the_given_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render([USER]) == "26 Jul 2024"


def test_tools_and_further_variables() -> None:
    source = "{% if tools is none %}no{% else %}{{ tools[0].function.name }}{% endif %} {{ think }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render(source, think=False) == "no False"
    assert render(source, tools=tools, think="on") == "f on"
    assert render(source, tools=[]) == "no "


@pytest.mark.parametrize("name", ["messages", "bos_token", "eos_token"])
def test_variables_of_the_server_cannot_be_set(name: str) -> None:
    template = ChatTemplate("x")
    with pytest.raises(InvalidRequest) as caught:
        template.render([USER], **{name: "y"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("tools", [5, True, "abc", {"a": 1}])
def test_tools_that_are_no_list_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a list") as caught:
        render("x", tools=tools)
    assert caught.value.param == "chat_template_kwargs.tools"


@pytest.mark.parametrize(
    "source",
    ["{{" + "(" * 5000 + ")" * 5000 + "}}", "{{ [" * 2000, "{{ " + "1" * 5000 + " }}"],
    ids=["parentheses", "lists", "number"],
)
def test_a_template_beyond_pythons_limits_is_broken(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source)


def test_errors_can_be_sent_whatever_the_template_says() -> None:
    for source in (
        "{{ raise_exception('\\ud800') }}",
        "{{ x['\\ud800'].y }}",
        "{{ strftime_now('\\ud800') }}",
        "{{ x '\\ud800' }}",
    ):
        with pytest.raises((InvalidRequest, ModelError)) as caught:
            render(source)
        str(caught.value).encode()


def test_one_render_leaves_no_trace_in_the_next() -> None:
    template = ChatTemplate("{{ x }}{% set x = 5 %}{{ messages | length }}")
    assert template.render([USER, USER], x=1) == "12"
    assert template.render([USER]) == "1"


TRIMS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"


def continued(source: str, *messages: dict[str, Any]) -> str:
    return render(source, *messages, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("content", "kept", "trimmed"),
    [("So", "So", "So"), (" So, ", " So, ", "So,"), ("", "", ""), (None, "", ""), ("\n", "\n", "")],
)
def test_the_last_message_stays_open(content: str | None, kept: str, trimmed: str) -> None:
    last = {"role": "assistant", "content": content}
    assert continued(CHATML, USER, last).endswith("<|im_start|>assistant\n" + kept)
    assert continued(TRIMS, USER, last) == "[user]Hi</s>[assistant]" + trimmed
    assert last["content"] == content


def test_a_last_message_of_parts_or_calls_stays_open() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert continued(TRIMS, {"role": "user", "content": parts}) == "[user]a\nb"
    said_twice = "{{ messages[-1].content }}|{{ messages[-1].content }}</s>"
    assert continued(said_twice, USER) == "Hi|Hi"


def test_what_cannot_be_continued_is_refused() -> None:
    hidden = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="does not show the last message") as caught:
        continued(hidden, USER, {"role": "assistant", "content": "So"})
    assert caught.value.param == "continue_final_message"
    with pytest.raises(InvalidRequest, match="set one of them"):
        render(CHATML, add_generation_prompt=True, continue_final_message=True)
