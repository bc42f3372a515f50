"""The error tree.

Every error an operator or a client can meet is one of these classes. Each knows the exit code it
becomes when it ends the process, or the HTTP status it becomes when it ends a request, and its
docstring says who raises it. Messages are one line: the thing, the place, the remedy.

Exit codes: 0 drained, 2 configuration, 3 address, 4 worker never answered, 5 start-up stage
failed, 6 engine died while serving, 7 drain deadline cut streams, 70 a bug in the parent,
128+n killed by the second signal n.
"""

from __future__ import annotations

from typing import ClassVar


class TrioserveError(Exception):
    """Base of all errors that are ours and are meant to be read by a person."""

    exit_code: ClassVar[int] = 70


# ---------------------------------------------------------------------------- process level


class ConfigError(TrioserveError):
    """The configuration cannot be used. Raised by ``trioserve.config`` before anything heavy.

    Attributes:
        problems: one line per fault, each naming file, line and key where they are known.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class BindError(TrioserveError):
    """A listening address cannot be had. Raised by ``trioserve.http.listeners``."""

    exit_code: ClassVar[int] = 3


class WorkerHandshakeError(TrioserveError):
    """The worker never said Hello, or said it in another protocol. Raised by ``trioserve.ipc``."""

    exit_code: ClassVar[int] = 4


class StartupError(TrioserveError):
    """A start-up stage failed. Raised by the supervisor; ``stage`` names which."""

    exit_code: ClassVar[int] = 5

    def __init__(self, stage: str, cause: str) -> None:
        super().__init__(f"start-up failed in stage {stage}: {cause}")
        self.stage = stage
        self.cause = cause


class ModelError(TrioserveError):
    """The model's files cannot be used. Raised by ``trioserve.models``; becomes a StartupError."""

    exit_code: ClassVar[int] = 5


class EngineDied(TrioserveError):
    """The engine ended while serving, by policy or after too many restarts."""

    exit_code: ClassVar[int] = 6


class WorkerDied(EngineDied):
    """The worker process ended unasked. Ends the incarnation; ``on_death`` decides the rest."""


class WorkerStalled(EngineDied):
    """The watchdog found the worker stuck. Ends the incarnation; ``on_death`` decides the rest."""


class DrainCut(TrioserveError):
    """The drain deadline came while streams were still running; they got an error event."""

    exit_code: ClassVar[int] = 7


# ---------------------------------------------------------------------------- request level


class RequestError(TrioserveError):
    """A request cannot be served; the fault ends this request and touches no other.

    Attributes:
        status: the HTTP status this becomes.
        type: OpenAI's ``error.type``.
        param: the request field at fault, or None.
        code: OpenAI's ``error.code``: a word for programs; ``default_code`` unless given.
        retry_after_s: value of the Retry-After header, or None for no header.
    """

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    default_code: ClassVar[str] = "invalid_request"
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class InvalidRequest(RequestError):
    """The request itself is wrong. Raised by the schema, the text layer and ``Engine.submit``."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt plus max_tokens, is over what the model or the cache can hold."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""

    status: ClassVar[int] = 404
    default_code: ClassVar[str] = "model_not_found"


class QueueFull(RequestError):
    """``[scheduler] max_waiting`` requests wait already. Raised by ``Engine.submit``."""

    status: ClassVar[int] = 429
    type: ClassVar[str] = "rate_limit_error"
    default_code: ClassVar[str] = "queue_full"
    retry_after_s: ClassVar[int | None] = 1


class NotReady(RequestError):
    """The engine is loading, restarting, stopping or dead. Raised by ``Engine.submit``."""

    status: ClassVar[int] = 503
    type: ClassVar[str] = "service_unavailable_error"
    default_code: ClassVar[str] = "not_ready"
    retry_after_s: ClassVar[int | None] = 1


class DeadlineExceeded(RequestError):
    """The request was not begun, or not finished, in the time it had. Raised by the HTTP layer."""

    status: ClassVar[int] = 504
    type: ClassVar[str] = "timeout_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="deadline_exceeded")


class RequestAborted(RequestError):
    """The server's operator ended the request. Raised to the reader of the stream."""

    status: ClassVar[int] = 409
    default_code: ClassVar[str] = "aborted"


class RequestFailed(RequestError):
    """The worker failed this request, or died under it. Raised to the reader of the stream."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "request_failed"


class RequestCut(RequestFailed):
    """The request was ended by the server's shutdown. Raised to the reader of the stream."""

    status: ClassVar[int] = 503
    type: ClassVar[str] = "service_unavailable_error"
    default_code: ClassVar[str] = "shutting_down"
