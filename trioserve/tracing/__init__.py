"""Spans of requests for OpenTelemetry, behind the extra ``otel``.

The tasks that answer requests only note what happened (``record``). A task of the server's tree
hands the notes in batches to a thread (``tracer``), which makes spans of them and sends them
(``spans``): the only module that imports the SDK, and only where ``[trace] endpoint`` is set.
"""
