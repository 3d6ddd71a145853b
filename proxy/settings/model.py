"""Every option: its name, type, default and meaning.

Frozen values; a part of the program is given the sub-model it needs. The text under a field is its documentation and
appears in `--help` and `configs/full.yaml`.
"""

# No `from __future__ import annotations` here: pydantic reads the annotations at run time.
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from proxy.common.endpoints import Host, is_loopback
from proxy.common.terms import counted
from proxy.settings.connectors import CONNECTOR_TRAITS, ConnectorTraits
from proxy.settings.discovery import Discovery
from proxy.settings.kinds import (
    AbsolutePath,
    Attempts,
    CollectorUrl,
    ConnectorName,
    Delay,
    Endpoints,
    FilePath,
    ListenPort,
    LogLevel,
    ModelAliases,
    Names,
    Natural,
    Networks,
    Origins,
    PolicyName,
    Positive,
    Ratio,
    RouteGroups,
    Sampling,
    Seconds,
    Secret,
    Workers,
)
from proxy.settings.kubernetes import Kubernetes
from proxy.settings.kv_events import KvEvents
from proxy.settings.policies import policy_names
from proxy.settings.replicas import Replicas
from proxy.settings.section import Section

# Each backend has a column in the scoreboard.
MAX_BACKENDS: Final = 1024


class Listen(Section):
    """The address that clients connect to, and limits on what a client may use."""

    host: Host = "127.0.0.1"
    """Host name or address to listen on; 0.0.0.0 means every IPv4 interface, :: every interface."""
    port: ListenPort = 1999
    """TCP port to listen on; 0 takes any free one."""
    max_body_bytes: Positive = 64 * 1024 * 1024
    """Largest request body in bytes; a larger one is refused with status 413."""
    max_body_elements: Positive = 4 * 1024 * 1024
    """Most elements of a JSON request body; one with more is refused with status 413 before it is parsed. Numbers and
    literals count 1 each, strings and names 8, arrays and objects 16, escapes in strings 1. Parsing a million of them
    takes up to 30 ms, during which no other request is served."""
    header_seconds: Seconds = 10.0
    """Deadline for the headers of a request, from its first byte or from the opening of the connection."""
    body_seconds: Seconds = 60.0
    """Deadline for the body of a request."""
    body_bytes_per_second: Natural = 1024
    """Least average rate of a request body after its first 5 seconds; a slower one is refused with status 408; 0: no
    such limit."""
    max_connections: Positive | None = None
    """Most client connections of a worker; further ones are answered with status 503; null: 45 % of the file
    descriptors that the process may have open."""
    keepalive_seconds: Seconds = 75.0
    """An idle client connection is closed after this long."""
    write_timeout_seconds: Seconds = 60.0
    """A client that reads nothing of its answer for this long is disconnected."""
    cors_origins: Origins = ()
    """Origins of web pages that may use the clients' routes from a browser, like https://chat.example.com; * allows
    every page. Administration is never open to web pages."""
    backlog: Positive = 4096
    """Connections that the kernel queues until they are accepted."""
    fast_path: bool = True
    """Whether the gateway's own reader reads plain requests, at a fraction of the price of aiohttp's. With false,
    aiohttp reads all requests. Deprecated: both readers lead to the same answers."""


class Admin(Section):
    """The routes for operators, and what may be done there."""

    host: Host = "127.0.0.1"
    """Host name or address of the listeners on admin.port and admin.probe_port."""
    port: ListenPort | None = None
    """TCP port of a separate listener for operators: administration and metrics are then only there, and the routes for
    probes on both; null: everything is on the clients' port."""
    probe_port: ListenPort | None = None
    """TCP port on which a separate thread answers /livez and /readyz, which a busy event loop cannot delay; null: no
    such port."""
    trust_local: bool = False
    """Whether programs of all users on this host may administer without a key on the clients' listener, if that is on a
    loopback address. By default only programs of the gateway's own user may, as a reverse proxy passes on requests of
    others. Only set it if no program on this host does that."""
    networks: Networks = (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
        *("::1/128", "fc00::/7"),
    )
    """Networks in which instances may be added at run time. Link-local, multicast and unspecified addresses and the
    metadata services of clouds are never allowed."""
    receipts_bytes: Natural = 4 * 1024 * 1024
    """Memory of each worker for what /admin/requests tells of requests that are over, one or two KiB each; a quarter
    of it is for those that something went wrong with; 0: nothing is kept."""


class Models(Section):
    """What clients call models."""

    aliases: ModelAliases = ()
    """Names that clients may use for models that engines call otherwise, as name=served name; the first that fits
    counts. In a name * and ? stand for anything, so claude-*=kimi sends all of Claude Code's models to kimi, and *=kimi
    every name that is not the served name of an alias. Aliases hold on every route. Answers that generate have the name
    that was asked for; those that are passed through, such as embeddings, have the served one."""
    system_first: Names = ()
    """Served names, with * and ?, of models whose chat template takes a message of the system at the beginning only:
    what messages and responses have of them later is joined to the first, at the cost of the prefix cache."""


class Admission(Section):
    """How many requests are admitted. Those that no instance has room for wait in a queue for a while."""

    max_running_prefill: Positive | None = None
    """Most requests in flight at a prefiller; null: what the engine reports (max_num_seqs), or no limit if it reports
    nothing."""
    max_running_decode: Positive | None = None
    """Most requests in flight at a decoder; null: what the engine reports (max_num_seqs), or no limit if it reports
    nothing."""
    max_waiting: Natural = 1024
    """Most requests that wait in the queue of a worker; further ones are refused with status 503."""
    wait_seconds: Seconds = 60.0
    """Longest wait in the queue; then the request is refused with status 503. Requests wait as long for instances that
    were up and refuse connections, since these may only be restarting. So do releases of KV for
    decoders."""
    max_predicted_wait_seconds: Seconds | None = None
    """Longest wait that is predicted: a request that would probably wait longer, or too long for its header
    x-ttft-deadline-ms, is refused at once with status 429 and told when it would not. null: none is refused early."""
    max_buffered_bytes: Positive = 1024 * 1024 * 1024
    """Most memory for all request bodies that a worker holds, with what their elements take if parsed; requests
    beyond it are refused with status 503."""


class Balance(Section):
    """How an instance is chosen among the eligible ones."""

    # Not in a docstring, which could not tell what is in the table.
    prefill_policy: PolicyName = Field(default="least_load", description=f"Policy for prefillers: {policy_names()}.")
    decode_policy: PolicyName = Field(default="least_load", description=f"Policy for decoders: {policy_names()}.")
    prefill_dp_ranks: Positive = 1
    """Data-parallel ranks behind the address of each vLLM prefiller, among which the gateway spreads its requests by
    the header X-data-parallel-rank; 1: the engine spreads them itself. Not needed with connector mooncake_bootstrap,
    whose engines report their ranks."""
    decode_dp_ranks: Positive = 1
    """Data-parallel ranks behind the address of each vLLM decoder; see prefill_dp_ranks."""
    long_prompt_tokens: Positive = 32 * 1024
    """Policy length_groups: estimated tokens from which a prompt belongs to the second half of the instances."""
    longest_prompt_tokens: Positive = 128 * 1024
    """Policy length_groups: the longest prompt there may be. How near a prompt's length is to those of the other half
    decides how much freer that half must be for the prompt to go there."""

    @model_validator(mode="after")
    def _long_is_below_longest(self) -> Self:
        if self.long_prompt_tokens >= self.longest_prompt_tokens:
            raise ValueError(
                f"long_prompt_tokens {self.long_prompt_tokens} is not below longest_prompt_tokens"
                f" {self.longest_prompt_tokens}"
            )
        return self


class Cost(Section):
    """How the load of a request is estimated before its tokens are known."""

    bytes_per_token: Positive = 4
    """Bytes of UTF-8 text that count as one token."""
    image_tokens: Natural = 1024
    """Estimated tokens of an image, whatever its size."""
    audio_tokens: Natural = 512
    """Estimated tokens of a piece of audio, whatever its length."""
    default_output_tokens: Natural = 256
    """Output tokens assumed for a request that sets no limit."""


class Retry(Section):
    """What happens when an instance fails before the client has any of the answer."""

    max_attempts: Attempts = 3
    """Most attempts per stage (prefill, decode), the first one included; 0 counts as 1. With 1 a client also gets an
    engine's 429 or 503 at once, without waiting in the queue."""
    base_delay_seconds: Delay = 0.025
    """Longest wait before the second attempt. It doubles with each further attempt, and the actual wait is a random
    part of it."""
    max_delay_seconds: Delay = Field(default_factory=lambda earlier: max(0.25, earlier["base_delay_seconds"]))
    """Longest wait before any attempt; by default 0.25, or base_delay_seconds if that is larger."""
    budget_share: Ratio = 0.2
    """Retry budget: share of the requests in flight that may be repeated or continued elsewhere at the same time;
    others wait for their turn. An attempt that could not even connect is repeated without it."""
    budget_least: Positive = 3
    """Requests that may be repeated or continued at the same time even if budget_share allows fewer."""
    budget_wait_seconds: Delay = 5.0
    """Longest wait of a request for a place in the retry budget; then it fails. An answer that had begun may wait for
    resume.deadline_seconds."""

    @model_validator(mode="after")
    def _cap_is_not_below_base(self) -> Self:
        if self.max_delay_seconds < self.base_delay_seconds:
            raise ValueError(
                f"max_delay_seconds {self.max_delay_seconds} is below base_delay_seconds {self.base_delay_seconds}"
            )
        return self


class Timeouts(Section):
    """How long to wait for an engine. Only progress counts: parts of an incomplete answer and the comments, heartbeats
    and empty chunks of a stream extend no deadline.
    """

    connect_seconds: Seconds = 2.0
    """Deadline for opening a connection to an engine."""
    prefill_seconds: Seconds = 300.0
    """Deadline for a prefiller's answer, apart from prefill_seconds_per_1k_tokens."""
    prefill_seconds_per_1k_tokens: Delay = 1.0
    """Added to prefill_seconds for every 1,000 tokens of the prompt."""
    handoff_seconds: Seconds = 60.0
    """Deadline from the prefiller's answer to the first bytes of the decoder's; at most half the time for which the
    prefiller keeps the KV cache."""
    first_token_seconds: Seconds = 300.0
    """Deadline for the beginning of a decoder's streamed answer, which includes fetching the KV cache."""
    answer_seconds: Seconds = 3600.0
    """Deadline for a decoder's answer that is not streamed, of which engines send nothing before its end. At most
    first_token_seconds plus one second for each token that the request allows."""
    idle_seconds: Seconds = 300.0
    """Deadline between two parts of a decoder's streamed answer."""


class Streaming(Section):
    """Streamed answers that are silent for a while. Proxies in front of the gateway cut connections without bytes,
    often after 50 to 60 seconds.
    """

    keep_alive_after_seconds: Seconds | None = None
    """Silence before the first byte of a streamed answer, after which the status 200 is sent with a comment, or with a
    ping event in messages; null: never. A request that fails after that gets an error event and no error status. Some
    load generators take the comment for the first token."""
    keep_alive_seconds: Seconds | None = None
    """Silence in a streamed answer whose status was sent, after which a comment or ping is sent, each time; null:
    never."""

    @property
    def keeps_alive(self) -> bool:
        """Return whether anything is sent to silent streams."""
        return self.keep_alive_after_seconds is not None or self.keep_alive_seconds is not None


class Kv(Section):
    """The hand-over of the KV cache from prefiller to decoder."""

    on_missing: Literal["retry_prefill", "local", "error"] = "retry_prefill"
    """What to do when a prefiller answers without KV parameters: retry_prefill asks another one, then lets the decoder
    compute a prompt of up to local_max_tokens by itself; local always lets the decoder compute it; error fails the
    request."""
    local_max_tokens: Natural = 2048
    """Most tokens of a prompt that a decoder may compute by itself when on_missing is retry_prefill and asking another
    prefiller did not help, and with skip_prefill."""
    prefill_min_tokens: Natural = 0
    """Prompts estimated to have fewer tokens than this are sent to a decoder alone, which computes them by itself; with
    connectors vllm_pull and vllm_store."""
    skip_prefill: bool = False
    """Whether a decoder computes a prompt by itself where that is predicted to be sooner than prefill and hand-over:
    short prompts, and those that it has nearly all of in its cache, as the next turn of a loop of tool calls; with
    connectors vllm_pull and vllm_store, and policy least_load for prefillers. Answers that are being written there wait
    meanwhile, so a decoder that is as busy as it should be is left alone."""
    on_unsupported: Literal["error", "local"] = "error"
    """What to do with requests that no hand-over can serve, with vLLM's connectors: beam search, best_of larger than n,
    and log probabilities of the prompt (echo with logprobs, prompt_logprobs) with more than one token to generate.
    error refuses them with status 400; local has a decoder serve them alone. With at most one token to generate, a
    prefiller serves log probabilities of the prompt alone."""
    release: Literal["auto", "never"] = "auto"
    """What to do with KV cache that no decoder fetched, because the request failed or the client left: auto asks a
    decoder to release it if the engines are able to; never leaves it to the prefiller, which frees it after
    pin_seconds."""
    pin_seconds: Seconds | None = None
    """How long prefillers keep KV cache that is not fetched, which the gateway accounts for when it chooses among them;
    null: the default of their version and KV connector (30 with NixlConnector since vLLM 0.23, otherwise 480)."""


class Sglang(Section):
    """SGLang engines, with connector sglang_bootstrap."""

    dp_size: Positive = 1
    """Data-parallel ranks of a prefiller (its --dp-size), among which the gateway spreads requests by load; 1: they are
    chosen at random."""
    chat_sampling: Sampling = ()
    """What chats are sampled by that do not say so themselves, as name=number for temperature, top_p, top_k and min_p:
    what the model's generation_config.json says, and 1, 1, -1 and 0 where it says nothing. If anything is named, chats
    of Kimi K2 models are asked for as completions, whose streams tell token ids, so that they go on exactly when their
    decoder is lost; []: they stay chats."""


class Layerwise(Section):
    """Where decoders call the gateway back, with connector ascend_layerwise. Each worker has its own port."""

    host: Host | None = None
    """Host name or address to listen on for callbacks; null: listen.host."""
    port: ListenPort = 0
    """TCP port of the first worker; the other workers take the ports that follow; 0: each worker takes any free one."""
    advertised_host: Host | None = None
    """Host name or address at which decoders reach this gateway; null: layerwise.host, or else listen.host."""
    callback_seconds: Seconds = 60.0
    """Deadline for the decoder's callback, which it sends when it has room for the KV cache."""


class Mooncake(Section):
    """Prefillers that run vLLM's own MooncakeConnector, with connector mooncake_bootstrap."""

    bootstrap_port: ListenPort = Field(default=8998, ge=1)
    """TCP port of the bootstrap server of prefillers (their VLLM_MOONCAKE_BOOTSTRAP_PORT); a port behind the address of
    a prefiller takes precedence."""


class Resume(Section):
    """What happens when a decoder is lost in the middle of an answer, or asks for recomputation."""

    mode: Literal["off", "restart-only", "exact"] = "exact"
    """exact continues an answer at the token where it broke off, if the engines are able to; restart-only only repeats
    an answer of which the client has nothing yet; off does neither."""
    max_attempts: Natural = 3
    """How often one answer may be continued."""
    deadline_seconds: Seconds = 30.0
    """How long to look for instances that can continue an answer."""
    chats: Literal["auto", "native", "ascend_private", "completions"] = "auto"
    """How chats are continued from token ids: native uses kv_transfer_params.prompt_token_ids of vLLM 0.27 on, or
    input_ids of an SGLang whose chats tell token ids; ascend_private the key of a vllm-ascend 0.26 patch; completions
    sends the ids to /v1/completions of vLLM, and the gateway parses the text; auto chooses by the engines' version."""
    repeat_up_to_tokens: Natural = 32
    """An answer that is not streamed and cannot be longer than this many tokens is repeated as a whole if its decoder
    is lost; longer ones are watched token by token and continued; 0: all are watched."""
    pressure_seconds: Delay = 5.0
    """A decoder that asked for recomputation gets no new requests for this long if there is another one."""


class HealthChecks(Section):
    """How the health of instances is checked, and when they are ejected."""

    interval_seconds: Seconds = 5.0
    """Time between two health checks of an instance."""
    timeout_seconds: Seconds = 5.0
    """A health check that takes longer than this has failed."""
    fall: Positive = 3
    """Failed health checks in a row after which an instance is down."""
    rise: Positive = 2
    """Passed health checks in a row after which an instance is up again."""
    jitter: Ratio = 0.2
    """Random share by which each interval is lengthened or shortened, so that checks do not coincide."""
    changing_interval_seconds: Seconds = 1.0
    """Time between two health checks of an instance whose state is about to change."""
    path: AbsolutePath = "/health"
    """Path that health checks request; status 200 passes."""
    eject_after: Positive = 5
    """Failed requests in a row after which an instance is ejected, whatever its health checks say."""
    eject_seconds: Seconds = 30.0
    """Length of the first ejection of an instance; the n-th in a row lasts n times as long, each with some jitter. Then
    one request is tried."""
    max_eject_seconds: Seconds = Field(default_factory=lambda earlier: max(300.0, earlier["eject_seconds"]))
    """Length of the longest ejection; by default 300, or eject_seconds if that is larger."""
    max_ejected_share: Ratio = 0.5
    """Largest share of the instances of a role that may be ejected; the last one never is."""
    stall_seconds: Seconds = 30.0
    """An instance that sends nothing for this long on any of its streams, while others of its role do, is ejected, and
    its answers are continued elsewhere. The time is longer for an instance that has recovered from a longer silence
    before."""
    silence_seconds: Delay = 10.0
    """Silence in the middle of an answer, in seconds, after which the instance's /metrics are read. If they show no
    progress, its answers are continued by another instance. The silence must also be 20 times as long as the instance
    usually takes between tokens. After 5 times as long, and at least a second, the instance is connected to; its silent
    answers are lost if it refuses. 0: silences are not looked into."""
    slow_start_seconds: Delay = 30.0
    """An instance that came back, or was added, reaches its full share of requests after this long; it begins with a
    tenth."""
    quarantine_after: Positive = 2
    """Failed hand-overs in a row between a prefiller and a decoder after which the two are kept apart for
    quarantine_seconds."""
    quarantine_seconds: Seconds = 60.0
    """How long a prefiller and a decoder are kept apart after failed hand-overs; longer if they fail again."""
    models_interval_seconds: Delay = 30.0
    """Least time between two looks at the models and adapters that a healthy engine lists, besides that when it comes
    up; 0: there are no others."""
    transfer_interval_seconds: Delay = 15.0
    """Least time between two readings of a decoder's /metrics, which follow hand-overs and show whether it fetches the
    KV cache or computes prompts once more; four times as long while all is well, and for prefillers, which with
    vllm_pull are read to see whether leases expire; 0: not read for that."""


class Doctor(Section):
    """Test prompts of the gateway's own, as `pdproxy doctor` sends them, through each pair of a prefiller and a decoder
    while it serves.
    """

    every_seconds: Delay = 0.0
    """Time in which each pair gets one such prompt, one pair after the other, and each decoder one alone; 0: none are
    sent."""
    canary_tokens: Positive = 2048
    """About how long such a prompt is, in tokens; at least kv.prefill_min_tokens."""
    canary_seconds: Seconds = 60.0
    """Deadline for its answer."""


class Joining(Section):
    """Instances that are added at run time and do not answer yet."""

    max_attempts: Attempts = 3
    """How often an added instance is asked before it is given up; 0 counts as 1."""
    interval_seconds: Seconds = 10.0
    """Time between two attempts to reach an added instance."""


class Leaving(Section):
    """Instances that are removed, by an administrator or from the configuration, or say that they are leaving."""

    evacuate_after_seconds: Delay | None = None
    """Requests that are still in flight at a removed instance after this long are continued by others, as if it had
    failed; null: they may end there, however long that takes. evacuate_after of /instances/remove takes precedence."""
    evacuate_on_503: bool = True
    """An instance that is down because its health checks are answered with 503 (health.fall of them in a row) says that
    it is leaving, as SGLang does after SIGTERM: what it still works on is continued by others at once; false: it may
    end there. Not for engines whose health checks say 503 when they are merely busy."""


class Fanout(Section):
    """Requests with several prompts or samples, which are split into single units."""

    max_units: Positive = 1024
    """Most units that a request may be split into; one with more is refused with status 400."""
    concurrency: Positive = 64
    """Most units of one request that run at the same time, and most items of a unit that are encoded at the same
    time."""


class Drain(Section):
    """What happens after SIGTERM."""

    not_ready_seconds: Delay = 5.0
    """How long new requests are still accepted while /readyz already fails, so that load balancers can notice."""
    streams_seconds: Seconds = 300.0
    """How long requests in flight may then take to finish; those that remain end with an error."""


class Auth(Section):
    """Keys. They come from the environment or from files, never from the command line. A relative path is relative to
    the directory of the configuration file that has it, or to the working directory if the environment has it.
    """

    engine_api_key: Secret = None
    """Key that engines are sent as a bearer token; by default the environment's OPENAI_API_KEY; empty: none."""
    engine_api_key_file: FilePath = None
    """File that holds engine_api_key."""
    admin_key: Secret = None
    """Key for administration from anywhere; none: only programs on this host may administer, and only if the listener
    is on a loopback address."""
    admin_key_file: FilePath = None
    """File that holds admin_key."""
    client_keys_file: FilePath = None
    """YAML file with the keys of clients and their limits, loaded again when it changes; none: clients need no key."""


class Log(Section):
    """The program's log."""

    level: LogLevel = "INFO"
    """Lowest level that is logged: DEBUG, INFO, WARNING, ERROR or CRITICAL."""
    format: Literal["auto", "text", "json"] = "auto"
    """Format of the lines: text, json, or auto, which is text on a terminal and json elsewhere."""


class Tracing(Section):
    """Spans of requests for a collector of OpenTelemetry. Needs the extra otel: pip install 'pdproxy[otel]'."""

    endpoint: CollectorUrl = None
    """URL that a collector takes traces at by OTLP over HTTP, such as http://localhost:4318/v1/traces; by default what
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT say; none: nothing is traced."""
    sample_ratio: Ratio | None = None
    """Share of the requests that is traced, of those whose clients do not say whether they are; null: what
    OTEL_TRACES_SAMPLER says, or else all."""


class Settings(Section):
    """All options. Loading them from the command line, the environment and a file is `proxy.settings.load`."""

    prefill: Endpoints = ()
    """Prefillers, as host:port or host:first-last; none with connector plain. One with sglang_bootstrap or
    mooncake_bootstrap may be followed by its bootstrap port, as in `10.0.0.1:30000 8998`, and each by what it serves,
    as in `10.0.0.1:7100 model=kimi`; otherwise its engine is asked."""
    decode: Endpoints = ()
    """Decoders, as host:port or host:first-last, perhaps with what they serve."""
    encode: Endpoints = ()
    """Encoders, as host:port or host:first-last: vLLM engines that first encode the images, audio and video of a chat
    and share the results with the others (--ec-transfer-config); none: prefillers encode them."""
    connector: ConnectorName = "vllm_pull"
    """How the KV cache travels: vllm_pull (the decoder fetches it), vllm_store (through a store that engines share),
    mooncake_bootstrap (vLLM's own MooncakeConnector; the legs meet at the prefiller's bootstrap server),
    sglang_bootstrap (SGLang; likewise), ascend_layerwise (the prefiller sends it after the decoder has called back) or
    plain (every engine does both stages); auto asks the engines what they are, once, at the start."""
    workers: Workers = 1
    """Number of processes that serve requests; auto: one per core."""
    worker_timeout_seconds: Seconds | None = 30.0
    """A worker that has stood still for this long is killed and replaced, if there are several; null: never."""
    passthrough: RouteGroups = ("tokenizer", "pooling")
    """Groups of routes that are passed through to one engine: tokenizer (/tokenize …), pooling (/v1/embeddings …)."""
    listen: Listen = Listen()
    admin: Admin = Admin()
    models: Models = Models()
    admission: Admission = Admission()
    balance: Balance = Balance()
    cost: Cost = Cost()
    retry: Retry = Retry()
    timeouts: Timeouts = Timeouts()
    stream: Streaming = Streaming()
    kv: Kv = Kv()
    sglang: Sglang = Sglang()
    layerwise: Layerwise = Layerwise()
    mooncake: Mooncake = Mooncake()
    resume: Resume = Resume()
    health: HealthChecks = HealthChecks()
    doctor: Doctor = Doctor()
    discovery: Discovery = Discovery()
    kubernetes: Kubernetes = Kubernetes()
    joining: Joining = Joining()
    leaving: Leaving = Leaving()
    fanout: Fanout = Fanout()
    drain: Drain = Drain()
    auth: Auth = Auth()
    replicas: Replicas = Replicas()
    kv_events: KvEvents = KvEvents()
    log: Log = Log()
    tracing: Tracing = Tracing()

    @model_validator(mode="after")
    def _every_backend_is_one_backend(self) -> Self:
        nouns: dict[tuple[str, int], str] = {}
        for noun, endpoints in (("a prefiller", self.prefill), ("a decoder", self.decode), ("an encoder", self.encode)):
            for endpoint in endpoints:
                before = nouns.setdefault(endpoint.place, "")
                if before == noun:
                    raise ValueError(f"{endpoint} is given twice as {noun}")
                if before:
                    raise ValueError(f"{endpoint} is given both as {before} and as {noun}")
                nouns[endpoint.place] = noun
                if noun != "a prefiller" and endpoint.bootstrap_port is not None:
                    raise ValueError(f"{endpoint} is {noun}: only prefillers have bootstrap ports")
        if self.connector == "auto" and any(
            self.may_find(role) and not listed for role, listed in (("prefill", self.prefill), ("decode", self.decode))
        ):
            raise ValueError("connector auto asks the configured instances: name the connector if all are discovered")
        traits = self.connector_traits
        if (
            self.prefill or self.discovery.prefill_dns or self.kubernetes.prefill_selector
        ) and not traits.takes_prefillers:
            raise ValueError(f"connector {self.connector} has no prefillers: give every engine as a decoder")
        if self.has_encoders and not traits.takes_encoders:
            its = f"{traits.engine}'s encoders"
            raise ValueError(f"connector {self.connector} has no encoders: {its} work in another way")
        if len(nouns) > MAX_BACKENDS:
            raise ValueError(f"{len(nouns)} instances are given, but {MAX_BACKENDS} is the limit")
        return self

    @model_validator(mode="after")
    def _decoders_can_call_back(self) -> Self:
        if self.layerwise.port + self.workers - 1 > 65535:
            raise ValueError(f"layerwise.port {self.layerwise.port} leaves no ports for {self.workers} workers")
        if self.connector_traits.needs_callback_port:
            self.callback_host  # noqa: B018 raises
        return self

    @property
    def has_encoders(self) -> bool:
        """Whether there is a stage of encoders."""
        return bool(self.encode or self.discovery.encode_dns or self.kubernetes.encode_selector)

    def needs(self, role: str) -> bool:
        """Whether nothing is served without an instance of this role."""
        return role == "decode" or (role == "prefill" and self.connector_traits.needs_prefillers)

    def may_find(self, role: str) -> bool:
        """Whether instances of a role may come from a source of discovery."""
        return self.discovery.may_name(role) or self.kubernetes.may_name(role)

    @property
    def fleet(self) -> str:
        """How many instances are configured, and how many sources may name others, for people."""
        parts = [counted(len(self.prefill), "prefiller"), counted(len(self.decode), "decoder")]
        if sources := self.discovery.sources + self.kubernetes.sources:
            parts.append(counted(len(sources), "discovery source"))
        return ", ".join(parts)

    @property
    def connector_traits(self) -> ConnectorTraits:
        """What the rest of the program asks for instead of the connector's name."""
        return CONNECTOR_TRAITS[self.connector]

    @property
    def administration_host(self) -> str:
        """Where the listener is that has the routes of administration."""
        return self.listen.host if self.admin.port is None else self.admin.host

    @property
    def doors(self) -> tuple[str, ...]:
        """What an operator should know about who is served and who may administer, a sentence each."""
        told = []
        if not is_loopback(self.listen.host) and self.auth.client_keys_file is None:
            told.append(
                f"every client that can reach {self.listen.host} is served without a key: set auth.client_keys_file, "
                "or make sure that only your clients can reach it"
            )
        if not is_loopback(self.administration_host) and self.auth.admin_key is None:
            told.append(
                f"administration is closed, because other hosts may reach {self.administration_host}: set "
                "auth.admin_key, or admin.port for a listener on this host alone"
            )
        elif self.admin.trust_local and self.admin.port is None and self.auth.admin_key is None:
            told.append(
                "every program on this host may administer, and with it every client of a reverse proxy on this host: "
                "unset admin.trust_local or set auth.admin_key, unless there is no such program"
            )
        return tuple(told)

    @property
    def callback_host(self) -> str:
        """What decoders are told to call back, where they do. Raises ValueError if that is none."""
        host = self.layerwise.advertised_host or self.layerwise.host or self.listen.host
        if not host.strip("0.:"):
            raise ValueError(f"layerwise.advertised_host must be where decoders can call back: {host} is every address")
        return host
