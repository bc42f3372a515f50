"""A model's own chat template: messages to prompt."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from trioserve.errors import InvalidRequest, ModelError
from trioserve.text.messages import normalize_messages
from trioserve.text.template_limits import Limits, Stopped

if TYPE_CHECKING:
    from trioserve.text.template_sandbox import TemplateEnvironment

DEFAULT_LIMITS = Limits()
MAX_REFUSAL_CHARS = 2000
_OURS = ("messages", "bos_token", "eos_token")
# Ends a message that is to be continued: where it stands in the prompt, the prompt is cut. No text
# of a client's can hold it by chance. The space tells whether the template trims messages.
_CUT = "\uf8f7\uf8f8\uf8f9 "


class _Refused(Exception):
    """The template called ``raise_exception``."""


class TemplateStopped(InvalidRequest):
    """The template took more than it may. Raised by ``ChatTemplate.render``."""


class ChatTemplate:
    """A Jinja template in the dialect of model repositories, run in a sandbox that bounds it.

    Templates may use ``raise_exception``, ``strftime_now``, ``tojson`` (which leaves HTML and
    other scripts alone), ``break``, ``continue`` and ``{% generation %}``. What they take of time
    and memory is bounded, see ``template_sandbox``.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        now: Callable[[], datetime] = datetime.now,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Compile it.

        Raises:
            ModelError: the template is broken, with the line.
        """
        import jinja2

        self._globals = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._environment = _environment(now, cpu_clock)
        try:
            self._template = self._environment.metered(
                partial(self._environment.from_string, source), DEFAULT_LIMITS
            )
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"chat template, line {error.lineno}: {_sendable(str(error.message))}; "
                "correct it or give another template"
            ) from error
        except Exception as error:  # nested too deep, numbers too long: Python's own limits
            raise ModelError(
                f"chat template: cannot be compiled: {_told(error)}; give another template"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        limits: Limits | None = None,
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt. ``template_kwargs`` are further variables, such as ``enable_thinking``.

        Renderings of one template may run in several threads at once.

        The prompt has the model's control tokens in it: encode it without adding them again. With
        ``continue_final_message`` it ends with the text of the last message.

        Raises:
            TemplateStopped: it takes more than ``limits``, by default those of ``Limits``.
            InvalidRequest: a message has an illegal shape, the template refuses (its own message
                is passed on), or it fails on these messages; the last message is to be continued,
                but an answer opened as well, or the template does not show it.
        """
        for name in _OURS:
            if name in template_kwargs:
                path = f"chat_template_kwargs.{name}"
                raise InvalidRequest(f"{path} is set by the server", param=path)
        if tools is not None and not isinstance(tools, list | tuple):
            raise InvalidRequest("tools must be a list", param="chat_template_kwargs.tools")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message goes on with the last message, add_generation_prompt opens "
                "another; set one of them",
                param="continue_final_message",
            )
        normal = normalize_messages(messages)
        if continue_final_message:
            normal[-1]["content"] += _CUT
        variables = {
            "documents": None,
            **template_kwargs,
            **self._globals,
            "messages": normal,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(variables, limits)
        return _cut(text) if continue_final_message else text

    def _run(self, variables: Mapping[str, Any], limits: Limits | None) -> str:
        try:
            render = partial(self._template.render, variables)
            return self._environment.metered(render, limits or DEFAULT_LIMITS)
        except _Refused as refusal:
            raise InvalidRequest(
                _sendable(str(refusal))[:MAX_REFUSAL_CHARS], param="messages"
            ) from None
        except Stopped as stopped:
            raise TemplateStopped(
                f"the chat template was stopped: {stopped}", param="messages"
            ) from None
        except Exception as error:  # a template is a program; whatever it does, the server stands
            raise InvalidRequest(
                f"the model's chat template fails on this request: {_told(error)}",
                param="messages",
            ) from error


def _environment(
    now: Callable[[], datetime], cpu_clock: Callable[[], float]
) -> TemplateEnvironment:
    from trioserve.text.template_sandbox import MAX_FORM_CHARS, TemplateEnvironment

    environment = TemplateEnvironment(cpu_clock)
    environment.filters["tojson"] = environment.metered_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: now().strftime(form[:MAX_FORM_CHARS])
    return environment


def _cut(text: str) -> str:
    """``text`` up to where the last message ends."""
    mark = _CUT if _CUT in text else _CUT.rstrip()  # the template trims what it shows
    before, found, _ = text.rpartition(mark)
    if not found:
        raise InvalidRequest(
            "the chat template does not show the last message, so it cannot be continued",
            param="continue_final_message",
        )
    before = before.replace(mark, "")  # it may show a message more than once
    return before if mark is _CUT else before.rstrip()


def _told(error: Exception) -> str:
    reason = " ".join(_sendable(str(error)).split()) or "no reason given"
    return f"{type(error).__name__}: {reason[:300]}"


def _sendable(text: str) -> str:
    """``text`` as UTF-8 can carry it: a template's literals may hold halves of surrogate pairs."""
    return text.encode(errors="backslashreplace").decode()


def _refuse(message: Any = "the chat template refuses these messages") -> None:
    raise _Refused(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
