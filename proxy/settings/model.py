"""Every option: its name, type, default and meaning.

Frozen values; a part of the program is given the sub-model it needs. The text under a field is its documentation and
appears in `--help` and `configs/full.yaml`.
"""

# No `from __future__ import annotations` here: pydantic reads the annotations at run time.
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from proxy.common.endpoints import Endpoint, Host, is_loopback_host
from proxy.common.terms import format_count
from proxy.settings.connectors import CONNECTOR_TRAITS, ConnectorTraits
from proxy.settings.fleet import Discovery, Elastic, Kubernetes, KvEvents, Replicas
from proxy.settings.kinds import (
    AbsolutePath,
    Attempts,
    BooleanOrAuto,
    CollectorUrl,
    ConnectorName,
    Delay,
    Endpoints,
    FilePath,
    GatherSeconds,
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
    Section,
    Workers,
    list_policy_names,
)

# Each backend has a column in the scoreboard.
MAX_BACKENDS: Final = 1024


class Listen(Section):
    """The address that clients connect to, and limits on client requests."""

    host: Host = "127.0.0.1"
    """Host name or IP address to listen on. 0.0.0.0 listens on all IPv4 interfaces, :: on all interfaces. In YAML,
    write IPv6 addresses in quotes: "::". Requires a restart."""
    port: ListenPort = 1999
    """TCP port to listen on. 0 selects a free port. Requires a restart."""
    max_body_bytes: Positive = 64 * 1024 * 1024
    """Maximum size of a request body, in bytes. Larger bodies are rejected with status 413."""
    max_body_elements: Positive = 4 * 1024 * 1024
    """Maximum number of elements in a JSON request body. Bodies with more elements are rejected with status 413 before
    they are parsed. A number or literal counts as 1, a string or name as 8, an array or object as 16, and an escape in
    a string as 1. Parsing one million elements takes up to 30 ms, and no other request is served during that time."""
    header_seconds: Seconds = 10.0
    """Deadline for the headers of a request, in seconds. It starts with the first byte of the request, or when the
    connection opens."""
    body_seconds: Seconds = 60.0
    """Deadline for the body of a request, in seconds."""
    body_bytes_per_second: Natural = 1024
    """Minimum average rate of a request body, in bytes per second. The first 5 seconds are not checked. Slower bodies
    are rejected with status 408. 0 disables the check."""
    max_connections: Positive | None = None
    """Maximum number of client connections per worker. Requests on further connections are rejected with status 503.
    null allows 45 % of the process's file descriptor limit."""
    keepalive_seconds: Seconds = 75.0
    """Time after which an idle client connection is closed, in seconds."""
    write_timeout_seconds: Seconds = 60.0
    """Time after which a client that does not read its answer is disconnected, in seconds."""
    cors_origins: Origins = ()
    """Origins of web pages that may call the client routes from a browser, for example https://chat.example.com. *
    allows all pages. Administration is never available to web pages."""
    backlog: Positive = 4096
    """Maximum number of connections that the kernel queues before pdproxy accepts them. Requires a restart."""
    tls_certificate: FilePath = None
    """Path of a PEM file with the certificate of the listener for clients, followed by those of intermediate
    authorities. With a certificate, every client connects by TLS 1.2 or later. pdproxy reads the files again when they
    change and at a reload; open connections continue. A certificate that cannot be used is rejected, and the old one
    stays."""
    tls_key: FilePath = None
    """Path of a PEM file with the key of listen.tls_certificate, without a password. If empty, the key is in the file
    of the certificate."""
    tls_client_ca: FilePath = None
    """Path of a PEM file with the certificates of authorities. If set, every client must present a certificate that one
    of them has issued (mutual TLS)."""
    trusted_proxies: Networks = ()
    """Networks of reverse proxies whose X-Forwarded-For header names the client, for example 10.0.0.0/8. The log then
    has the client's address. Requests from these networks never count as requests of this host. Empty: the header is
    not used."""
    fast_path: bool = True
    """Whether pdproxy's own HTTP reader handles plain requests, at a fraction of the CPU time of aiohttp's reader.
    false sends all requests to aiohttp's reader. Deprecated: both readers give the same answers."""


class Admin(Section):
    """Administration and metrics."""

    host: Host = "127.0.0.1"
    """Host name or IP address of the listeners on admin.port and admin.probe_port. Requires a restart."""
    port: ListenPort | None = None
    """TCP port of a separate listener for administration and metrics, which are then not available on the client port.
    The probe routes are available on both. null serves all routes on the client port. Requires a restart."""
    probe_port: ListenPort | None = None
    """TCP port of a separate thread that answers /livez and /readyz even while the event loop is busy. null disables
    it. Requires a restart."""
    trust_local: bool = False
    """Whether programs of all users on this host may administer without a key through the client listener, if it
    listens on a loopback address. By default only programs of the gateway's own user may. Do not enable it if a reverse
    proxy on this host forwards requests of other hosts."""
    networks: Networks = (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
        *("::1/128", "fc00::/7"),
    )
    """Networks in which instances may be added at run time. Link-local, multicast and unspecified addresses and the
    metadata services of clouds are never allowed."""
    usage_file: FilePath = None
    """Path of an SQLite file on a local disk that keeps the usage of client keys by hour for 31 days, see /admin/usage.
    pdproxy creates the file. null keeps only the current and the last hour, in memory."""
    receipts_bytes: Natural = 4 * 1024 * 1024
    """Memory per worker for the history of finished requests in /admin/requests, in bytes. One request takes 1 to 2
    KiB. A quarter of the memory is reserved for failed requests. 0 disables the history. Requires a restart."""
    tls_certificate: FilePath = None
    """Path of a PEM file with the certificate of the listener on admin.port, followed by those of intermediate
    authorities. With a certificate, every program connects by TLS 1.2 or later. pdproxy reads the files again when they
    change and at a reload; open connections continue. A certificate that cannot be used is rejected, and the old one
    stays."""
    tls_key: FilePath = None
    """Path of a PEM file with the key of admin.tls_certificate, without a password. If empty, the key is in the file of
    the certificate."""
    tls_client_ca: FilePath = None
    """Path of a PEM file with the certificates of authorities. If set, every program must present a certificate that
    one of them has issued (mutual TLS)."""


class Engines(Section):
    """TLS to engines whose address begins with https://."""

    ca_file: FilePath = None
    """Path of a PEM file with the certificates of the authorities that may issue the engines' certificates. If empty,
    the authorities of the system may. pdproxy reads the file again when it changes and at a reload."""
    client_certificate: FilePath = None
    """Path of a PEM file with the certificate that pdproxy presents to engines. If empty, it presents none."""
    client_key: FilePath = None
    """Path of a PEM file with the key of engines.client_certificate, without a password. If empty, the key is in the
    file of the certificate."""
    server_name: Host | None = None
    """Name that the certificate of every engine must contain. null requires the host name or IP address with which the
    engine is configured."""
    verify: bool = True
    """Whether pdproxy verifies the certificates of engines. With false, another host can pose as an engine and read all
    prompts and the engines' key."""


class Models(Section):
    """Names of models."""

    aliases: ModelAliases = ()
    """Names that clients may use for models, as name=served name. The first match applies. * and ? in a name are
    wildcards: claude-*=kimi maps all models of Claude Code to kimi, and *=kimi maps every name that is not the served
    name of an alias. Aliases apply to all routes. Generated answers contain the name from the request; forwarded
    answers, such as embeddings, contain the served name."""
    system_first: Names = ()
    """Served names, with the wildcards * and ?, of models whose chat template accepts a system message only at the
    beginning. pdproxy appends later system messages of the messages and responses APIs to the first one. This reduces
    prefix cache hits."""


class Admission(Section):
    """Limits on running, queued and buffered requests. Requests that no instance has room for wait in a queue."""

    max_running_prefill: Positive | None = None
    """Maximum number of requests in flight at a prefiller. null uses the engine's max_num_seqs, or no limit if the
    engine does not report it."""
    max_running_decode: Positive | None = None
    """Maximum number of requests in flight at a decoder. null uses the engine's max_num_seqs, or no limit if the engine
    does not report it."""
    max_waiting: Natural = 1024
    """Maximum number of requests in the queue of a worker. Further requests are rejected with status 503."""
    wait_seconds: Seconds = 60.0
    """Maximum time in the queue, in seconds. After this time the request is rejected with status 503. The same limit
    applies to requests, and to releases of KV cache, that wait for instances that were up and now refuse connections
    or let health checks time out, for example during a restart."""
    session_patience_seconds: Seconds = 30.0
    """Time in seconds after which a turn that waits for room in the prefix caches takes the place of a session that has
    had several turns. See balance.working_sets."""
    session_wait_seconds: Seconds = 180.0
    """Maximum time that a turn waits for room in the prefix caches, in seconds. After this time it is admitted. No
    request is rejected because of this wait. See balance.working_sets."""
    max_predicted_wait_seconds: Seconds | None = None
    """Maximum predicted time in the queue, in seconds. Requests that would probably wait longer, or miss the deadline
    in their x-ttft-deadline-ms header, are rejected immediately with status 429 and a Retry-After header. null disables
    the prediction."""
    max_buffered_bytes: Positive = 1024 * 1024 * 1024
    """Maximum memory of a worker for request bodies, in bytes, including the memory of their parsed elements. Further
    requests are rejected with status 503."""


class Balance(Section):
    """How pdproxy chooses an instance."""

    # Descriptions instead of docstrings, because the table of policies has the names.
    prefill_policy: PolicyName = Field(
        default="least_load", description=f"Policy for prefillers: {list_policy_names()}."
    )
    decode_policy: PolicyName = Field(default="least_load", description=f"Policy for decoders: {list_policy_names()}.")
    working_sets: bool = True
    """Let turns of conversations wait while more conversations are open than the prefix caches of prefillers hold, so
    that the others keep their prefixes. Policy least_load does so after it has seen prefixes evicted before their next
    use, and stops if that does not help. Requires engines that report cached tokens."""
    prefill_dp_ranks: Positive = 1
    """Number of data-parallel ranks behind the address of each vLLM prefiller. pdproxy selects a rank with the
    X-data-parallel-rank header. With 1, the engine distributes requests itself. Not needed with connector
    mooncake_bootstrap, whose engines report their ranks."""
    decode_dp_ranks: Positive = 1
    """Number of data-parallel ranks behind the address of each vLLM decoder. See prefill_dp_ranks."""
    long_prompt_tokens: Positive = 32 * 1024
    """Policy length_groups: number of estimated tokens from which a prompt belongs to the group of long prompts, which
    the second half of the instances serves."""
    longest_prompt_tokens: Positive = 128 * 1024
    """Policy length_groups: maximum prompt length, in tokens. It determines when a prompt may overflow into the other
    group: the closer its length is to that group, the less idle the other group has to be."""

    @model_validator(mode="after")
    def _long_is_below_longest(self) -> Self:
        if self.long_prompt_tokens >= self.longest_prompt_tokens:
            raise ValueError(
                f"long_prompt_tokens {self.long_prompt_tokens} is not below longest_prompt_tokens"
                f" {self.longest_prompt_tokens}"
            )
        return self


class Cost(Section):
    """How the load of a request is estimated before the engine reports its tokens."""

    bytes_per_token: Positive = 4
    """Number of bytes of UTF-8 text that count as one token."""
    image_tokens: Natural = 1024
    """Estimated number of tokens of an image of any size."""
    audio_tokens: Natural = 512
    """Estimated number of tokens of an audio input of any length."""
    default_output_tokens: Natural = 256
    """Estimated number of output tokens of a request without a limit."""


class Retry(Section):
    """Retries after an instance fails before the client has received any part of the answer."""

    max_attempts: Attempts = 3
    """Maximum number of attempts per stage (prefill, decode), including the first. 0 counts as 1. With 1, an engine's
    429 or 503 is returned to the client without waiting in the queue."""
    base_delay_seconds: Delay = 0.025
    """Maximum delay before the second attempt, in seconds. It doubles with each further attempt. The actual delay is a
    random part of it."""
    max_delay_seconds: Delay = Field(default_factory=lambda earlier: max(0.25, earlier["base_delay_seconds"]))
    """Maximum delay before any attempt, in seconds. The default is 0.25, or base_delay_seconds if that is larger."""
    budget_share: Ratio = 0.2
    """Retry budget: maximum share of the requests in flight that may be in a retry or continuation at the same time,
    from 0 to 1. Further requests wait for a place. A retry after a failed connection attempt does not use the
    budget."""
    budget_least: Positive = 3
    """Number of retries and continuations that are always allowed at the same time, even if budget_share allows
    fewer."""
    budget_wait_seconds: Delay = 5.0
    """Maximum time that a request waits for a place in the retry budget, in seconds. After this time it fails. An
    answer that has begun may wait for resume.deadline_seconds."""

    @model_validator(mode="after")
    def _cap_is_not_below_base(self) -> Self:
        if self.max_delay_seconds < self.base_delay_seconds:
            raise ValueError(
                f"max_delay_seconds {self.max_delay_seconds} is below base_delay_seconds {self.base_delay_seconds}"
            )
        return self


class Timeouts(Section):
    """Deadlines for engines.

    Only progress counts: parts of an incomplete answer and the comments, heartbeats and empty chunks of a stream do not
    extend a deadline.
    """

    connect_seconds: Seconds = 2.0
    """Deadline for opening a connection to an engine, in seconds."""
    prefill_seconds: Seconds = 300.0
    """Deadline for a prefiller's answer, in seconds. prefill_seconds_per_1k_tokens is added to it."""
    prefill_seconds_per_1k_tokens: Delay = 1.0
    """Time added to prefill_seconds per 1,000 tokens of the prompt, in seconds."""
    handoff_seconds: Seconds = 60.0
    """Deadline from the prefiller's answer to the first bytes of the decoder's answer, in seconds. The effective
    deadline is at most half the time for which the prefiller keeps the KV cache."""
    first_token_seconds: Seconds = 300.0
    """Deadline for the start of a decoder's streamed answer, in seconds. It includes the transfer of the KV cache."""
    answer_seconds: Seconds = 3600.0
    """Deadline for a decoder's answer that is not streamed, in seconds. Engines send such an answer only when it is
    complete. The effective deadline is at most first_token_seconds plus one second per token that the request
    allows."""
    idle_seconds: Seconds = 300.0
    """Deadline between two parts of a decoder's streamed answer, in seconds."""


class Streaming(Section):
    """Streamed answers: keep-alive messages, and how tokens are passed on.

    Proxies in front of the gateway close connections that carry no bytes, often after 50 to 60 seconds.
    """

    keep_alive_after_seconds: Seconds | None = None
    """Time before the first byte of a streamed answer after which pdproxy sends status 200 and a comment, in seconds.
    The messages API gets a ping event instead of a comment. A request that fails later gets an error event instead of
    an error status. Some load generators count the comment as the first token. null disables it."""
    keep_alive_seconds: Seconds | None = None
    """Interval of comments or ping events while a started stream has no output, in seconds. null disables them."""
    native_pump: bool = True
    """Whether the compiled build passes tokens on in C, which takes less CPU time than in Python. The bytes are the
    same. Applies to new connections to engines."""
    gather_seconds: GatherSeconds = "auto"
    """Maximum time for which tokens wait for further ones of their stream, in seconds. pdproxy reads and writes such
    tokens together, which takes less CPU time. The first eight tokens of an answer never wait, and client keys can
    decline (gather_tokens). auto: up to 0.05, only while the event loop of a worker takes more than
    gather_above_cpu_share. 0: tokens never wait. A number up to 0.2: tokens always wait that long."""
    gather_above_cpu_share: Ratio = 0.8
    """CPU time of a worker's event loop, as a share of a core, above which tokens wait. They stop waiting when the
    share is lower by 0.2. Applies to gather_seconds: auto."""

    @property
    def keeps_alive(self) -> bool:
        """Return whether anything is sent to silent streams."""
        return self.keep_alive_after_seconds is not None or self.keep_alive_seconds is not None


class Kv(Section):
    """The KV handoff from prefiller to decoder."""

    on_missing: Literal["retry_prefill", "local", "error"] = "retry_prefill"
    """Action when a prefiller answers without KV parameters. retry_prefill: ask another prefiller; if that fails, too,
    the decoder recomputes prompts of at most local_max_tokens. local: the decoder always recomputes the prompt. error:
    the request fails."""
    local_max_tokens: Natural = 2048
    """Maximum length of a prompt that a decoder may compute, in tokens. Applies to on_missing: retry_prefill and to
    skip_prefill."""
    prefill_min_tokens: Natural = 0
    """Minimum estimated length of a prompt that is sent to a prefiller, in tokens. Decoders compute shorter prompts.
    Only with connectors vllm_pull and vllm_store."""
    skip_prefill: BooleanOrAuto = "auto"
    """Whether a decoder computes a prompt if its first token is predicted sooner than with queue, prefill and handoff.
    This applies to short prompts and to prompts that are mostly in the decoder's cache, such as the next turn of a
    tool-call loop. Computing a prompt delays the running answers of its decoder. pdproxy learns by how much from the
    times of their tokens, and all requests together must gain. auto: only prompts that would wait in the queue for a
    prefiller are computed by decoders, and until the delay is learned, pdproxy assumes that running answers stop
    meanwhile. true: it assumes that each running answer loses a quarter of this time. Decoders under full load are
    skipped. Only with connectors vllm_pull and vllm_store and prefill policy least_load."""
    read_back: Literal["auto", "off"] = "auto"
    """Whether a prefiller reads the KV cache of a conversation's previous answer from its decoder. auto: if both
    engines report `bidirectional_kv_xfer` (vLLM's NixlConnector with VLLM_SERVER_DEV_MODE=1), and the prompt begins
    with exactly these tokens. off: never. Only with connector vllm_pull."""
    on_unsupported: Literal["error", "local"] = "error"
    """Action for requests that vLLM's connectors cannot disaggregate: beam search, best_of > n, and prompt logprobs
    (echo with logprobs, prompt_logprobs) with more than one output token. error: reject with status 400. local: a
    decoder serves the whole request. With at most one output token, a prefiller serves prompt logprobs alone."""
    release: Literal["auto", "never"] = "auto"
    """Action for KV cache that no decoder fetched because the request failed or the client disconnected. auto: pdproxy
    asks a decoder to release it, if the engines support that. never: the prefiller frees it after pin_seconds."""
    pin_seconds: Seconds | None = None
    """Time for which prefillers keep KV cache that no decoder fetches, in seconds. pdproxy counts this cache when it
    chooses a prefiller. null uses the default of the engine's version and KV connector: 30 with NixlConnector since
    vLLM 0.23, otherwise 480."""


class Sglang(Section):
    """Options for SGLang engines (connector sglang_bootstrap)."""

    dp_size: Positive = 1
    """Number of data-parallel ranks of a prefiller (its --dp-size). pdproxy distributes requests to the ranks by load.
    With 1, ranks are chosen at random."""
    chat_sampling: Sampling = ()
    """Default sampling parameters of chats, as name=number for temperature, top_p, top_k and min_p. Use the values of
    the model's generation_config.json, and 1, 1, -1 and 0 for missing values. If set, chats of Kimi K2 models are sent
    as completions. Their streams contain token IDs, so the answers resume exactly after a decoder is lost. If empty,
    chats are sent as chats."""


class Layerwise(Section):
    """The address that decoders call back (connector ascend_layerwise). Each worker has its own port."""

    host: Host | None = None
    """Host name or IP address of the listener for callbacks. null uses listen.host. Requires a restart."""
    port: ListenPort = 0
    """TCP port of the first worker for callbacks. The other workers use the next ports. 0 selects a free port for each
    worker. Requires a restart."""
    advertised_host: Host | None = None
    """Host name or IP address under which decoders reach this gateway. null uses layerwise.host, or listen.host if that
    is null, too. Requires a restart."""
    callback_seconds: Seconds = 60.0
    """Deadline for the decoder's callback, in seconds. A decoder sends it when it has room for the KV cache."""


class Mooncake(Section):
    """Options for vLLM's own MooncakeConnector (connector mooncake_bootstrap)."""

    bootstrap_port: ListenPort = Field(default=8998, ge=1)
    """TCP port of the bootstrap server of prefillers (their VLLM_MOONCAKE_BOOTSTRAP_PORT). A port after a prefiller's
    address takes precedence."""


class Resume(Section):
    """How an answer continues after its decoder is lost or asks for recomputation."""

    mode: Literal["off", "restart-only", "exact"] = "exact"
    """How answers continue after a failure. exact: at the token where the answer broke off, if the engines support
    that. restart-only: an answer restarts only if the client has not received any part of it. off: answers are not
    continued."""
    max_attempts: Natural = 3
    """Maximum number of times that one answer is continued."""
    deadline_seconds: Seconds = 30.0
    """Maximum time to search for instances that can continue an answer, in seconds."""
    chats: Literal["auto", "native", "ascend_private", "completions"] = "auto"
    """How chats continue from token IDs. native: kv_transfer_params.prompt_token_ids (vLLM 0.27 and later), or
    input_ids (SGLang versions whose chats report token IDs). ascend_private: the key of a vllm-ascend 0.26 patch.
    completions: pdproxy sends the IDs to vLLM's /v1/completions and parses the text. auto: selected by the engines'
    version."""
    repeat_up_to_tokens: Natural = 32
    """Maximum length of an answer that is repeated as a whole after its decoder is lost, in tokens. Applies to answers
    that are not streamed. Longer answers are tracked token by token and continued. With 0, all answers are tracked."""
    pressure_seconds: Delay = 5.0
    """Time for which a decoder gets no new requests after it asked for recomputation, in seconds. Applies only if
    another decoder is available."""


class HealthChecks(Section):
    """Health checks, ejection and quarantine of instances."""

    interval_seconds: Seconds = 5.0
    """Interval between two health checks of an instance, in seconds."""
    timeout_seconds: Seconds = 5.0
    """Deadline for a health check, in seconds."""
    fall: Positive = 3
    """Number of consecutive failed health checks after which an instance is down."""
    rise: Positive = 2
    """Number of consecutive successful health checks after which an instance is up again."""
    jitter: Ratio = 0.2
    """Random share by which each interval is extended or shortened, from 0 to 1. It prevents simultaneous health
    checks."""
    changing_interval_seconds: Seconds = 1.0
    """Interval between two health checks of an instance whose state is about to change, in seconds."""
    path: AbsolutePath = "/health"
    """HTTP path of health checks. Status 200 is a success."""
    eject_after: Positive = 5
    """Number of consecutive failed requests after which an instance is ejected, whatever its health checks report."""
    eject_seconds: Seconds = 30.0
    """Duration of the first ejection of an instance, in seconds. The n-th consecutive ejection lasts n times as long,
    with jitter. After an ejection, one trial request decides whether the instance returns."""
    max_eject_seconds: Seconds = Field(default_factory=lambda earlier: max(300.0, earlier["eject_seconds"]))
    """Maximum duration of an ejection, in seconds. The default is 300, or eject_seconds if that is larger."""
    max_ejected_share: Ratio = 0.5
    """Maximum share of the instances of a role that may be ejected, from 0 to 1. The last available instance is never
    ejected."""
    stall_seconds: Seconds = 30.0
    """Time without bytes on all streams of an instance after which it is ejected, while other instances of its role
    send bytes, in seconds. Its answers continue on other instances. The time is longer for an instance that has
    recovered from a longer silence before."""
    silence_seconds: Delay = 10.0
    """Time without bytes within an answer after which pdproxy reads the instance's /metrics, in seconds. If the metrics
    show no progress, other instances continue its answers. The silence must also be 20 times as long as the instance's
    usual time between tokens. After 5 times that time, and at least one second, pdproxy opens a connection to the
    instance; if it refuses, its silent answers are considered lost. 0 disables the check."""
    slow_start_seconds: Delay = 30.0
    """Time in which a new or recovered instance reaches its full share of requests, in seconds. It starts with 10 % of
    its share."""
    quarantine_after: Positive = 2
    """Number of consecutive failed handoffs between a prefiller and a decoder after which pdproxy does not combine the
    two for quarantine_seconds."""
    quarantine_seconds: Seconds = 60.0
    """Duration of the quarantine of a prefiller and a decoder after failed handoffs, in seconds. It is longer if they
    fail again."""
    models_interval_seconds: Delay = 30.0
    """Minimum time between two requests for the models and adapters of a healthy engine, in seconds. pdproxy also
    requests them when the engine comes up. 0 disables the repetition."""
    transfer_interval_seconds: Delay = 15.0
    """Minimum time between two reads of a decoder's /metrics after handoffs, in seconds. They show whether the decoder
    fetches the KV cache or recomputes prompts. The time is four times as long while no problem is found, and for
    prefillers. With vllm_pull, the metrics of prefillers show expired leases. 0 disables the reads."""


class Doctor(Section):
    """Canary prompts, sent through each pair of a prefiller and a decoder while pdproxy serves.

    They are the same prompts that `pdproxy doctor` sends.
    """

    every_seconds: Delay = 0.0
    """Time in which each pair gets one canary prompt and each decoder gets one alone, in seconds. Pairs are tested one
    after the other. 0 disables canary prompts."""
    canary_tokens: Positive = 2048
    """Approximate length of a canary prompt, in tokens. The effective length is at least kv.prefill_min_tokens."""
    canary_seconds: Seconds = 60.0
    """Deadline for the answer to a canary prompt, in seconds."""


class Joining(Section):
    """How pdproxy connects to instances that are added at run time."""

    max_attempts: Attempts = 3
    """Number of connection attempts before an added instance is abandoned. 0 counts as 1."""
    interval_seconds: Seconds = 10.0
    """Interval between two connection attempts to an added instance, in seconds."""


class Leaving(Section):
    """What happens to the requests of an instance that is removed or shuts down."""

    evacuate_after_seconds: Delay | None = None
    """Time after the removal of an instance at which other instances continue its running requests as after a failure,
    in seconds. null lets the requests finish. The evacuate_after parameter of /instances/remove takes precedence."""
    evacuate_on_503: bool = True
    """Whether other instances immediately continue the running requests of an instance that is down because its health
    checks return 503 (health.fall times in a row). SGLang returns 503 after SIGTERM. Disable it for engines that return
    503 when they are busy."""


class Fanout(Section):
    """Requests with several prompts or samples. pdproxy splits them into single units."""

    max_units: Positive = 1024
    """Maximum number of units of a request. Requests with more units are rejected with status 400."""
    concurrency: Positive = 64
    """Maximum number of units of a request that run at the same time. The same limit applies to the media items of a
    unit that are encoded at the same time."""


class Drain(Section):
    """What happens after SIGTERM."""

    not_ready_seconds: Delay = 5.0
    """Time for which pdproxy still accepts requests while /readyz already fails, in seconds. Load balancers use this
    time to remove the gateway."""
    streams_seconds: Seconds = 300.0
    """Maximum time for running requests to finish after that, in seconds. The remaining requests end with an error."""


class Auth(Section):
    """Keys. They come from the environment or from files, never from the command line.

    A relative path is relative to the directory of the configuration file that names it, or to the working directory if
    it comes from the environment.
    """

    engine_api_key: Secret = None
    """Key that pdproxy sends to engines as a bearer token. The default is the environment variable OPENAI_API_KEY. If
    empty, engines get the client's key, except with client keys."""
    engine_api_key_file: FilePath = None
    """Path of a file that contains engine_api_key."""
    admin_key: Secret = None
    """Key for administration. Without a key, only programs on this host may administer, and only if the listener uses a
    loopback address."""
    admin_key_file: FilePath = None
    """Path of a file that contains admin_key."""
    client_keys_file: FilePath = None
    """Path of a YAML file with the keys of clients and their limits. pdproxy reads it again when it changes. Without a
    file, clients need no key."""
    max_key_series: Natural = 100
    """Maximum number of client keys with separate series in the pdproxy_key_* metrics. Further keys are
    summed up under the label (other). 0 disables these metrics."""


class Log(Section):
    """The log."""

    level: LogLevel = "INFO"
    """Minimum level of logged messages: DEBUG, INFO, WARNING, ERROR or CRITICAL."""
    format: Literal["auto", "text", "json"] = "auto"
    """Format of log lines: text, json or auto. auto selects text on a terminal and json otherwise. Requires a
    restart."""


class Tracing(Section):
    """OpenTelemetry spans of requests. Requires the extra otel: pip install '.[otel]' in the checkout."""

    endpoint: CollectorUrl = None
    """URL of a collector that accepts traces by OTLP over HTTP, for example http://localhost:4318/v1/traces. The
    default is OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT. If empty, tracing is disabled.
    Requires a restart."""
    sample_ratio: Ratio | None = None
    """Share of requests that are traced, from 0 to 1. The decision of a client that sends one takes precedence. null
    uses OTEL_TRACES_SAMPLER, or traces all requests. Requires a restart."""


class Settings(Section):
    """All options. `proxy.settings.load` reads them from the command line, the environment and a file."""

    prefill: Endpoints = ()
    """Addresses of prefillers, as host:port or host:first-last. An IPv6 address needs brackets, and quotes in YAML:
    `"[fd00::1]:7100"`. Leave empty with connector plain. With sglang_bootstrap
    or mooncake_bootstrap, a bootstrap port may follow the address, as in `10.0.0.1:30000 8998`. Models may follow, too,
    as in `10.0.0.1:7100 model=kimi`; without them pdproxy asks the engine."""
    decode: Endpoints = ()
    """Addresses of decoders, as for prefill. Models may follow the address."""
    encode: Endpoints = ()
    """Addresses of encoders, as host:port or host:first-last. Encoders are vLLM engines that encode the images, audio
    and video of a chat and share the results with the other engines (--ec-transfer-config). If empty, prefillers and
    decoders fetch and encode them. Adding the first or removing the last encoder requires a restart."""
    connector: ConnectorName = "vllm_pull"
    """Protocol of the KV handoff. vllm_pull: the decoder fetches the KV cache. vllm_store: the engines share a store.
    nixl_push: vLLM's NixlPushConnector; both legs at once, and the prefiller writes into the decoder's memory.
    mooncake_bootstrap: vLLM's own MooncakeConnector; both legs meet at the prefiller's bootstrap server.
    sglang_bootstrap: the same for SGLang. ascend_layerwise: the prefiller sends the KV cache after the decoder has
    called the gateway back. plain: every engine does both stages. auto: pdproxy asks the engines once, at startup.
    Requires a restart."""
    workers: Workers = 1
    """Number of processes that serve requests. auto starts one per core. Requires a restart."""
    worker_timeout_seconds: Seconds | None = 30.0
    """Time that the event loop of a worker may be blocked, in seconds. After this time the supervisor kills and
    replaces the worker. Applies only with several workers. null disables the check. Requires a restart."""
    passthrough: RouteGroups = ("tokenizer", "pooling")
    """Groups of routes that pdproxy forwards to one engine without changes: tokenizer (/tokenize …) and pooling
    (/v1/embeddings …). Requires a restart."""
    listen: Listen = Listen()
    admin: Admin = Admin()
    engines: Engines = Engines()
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
    elastic: Elastic = Elastic()
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
    def _check_backends_are_unique(self) -> Self:
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
        for endpoint in self.elastic.instances:
            noun = nouns.get(endpoint.place, "")
            if noun == "an elastic instance":
                raise ValueError(f"{endpoint} is given twice as an elastic instance")
            if noun == "an encoder":
                raise ValueError(f"{endpoint} is given both as an encoder and as an elastic instance")
            nouns[endpoint.place] = "an elastic instance"
        if self.connector == "auto" and any(
            self.may_find(role) and not self.instances_of(role) for role in ("prefill", "decode")
        ):
            raise ValueError("connector auto asks the configured instances: name the connector if all are discovered")
        traits = self.connector_traits
        if (
            self.prefill or self.discovery.prefill_dns or self.kubernetes.prefill_selector
        ) and not traits.takes_prefillers:
            raise ValueError(f"connector {self.connector} has no prefillers: give every engine as a decoder")
        if self.elastic.instances and not traits.exchanges_roles:
            raise ValueError(
                f"connector {self.connector} cannot exchange the roles of instances: give {self.elastic.instances[0]} "
                "as a prefiller or as a decoder, and not as elastic"
            )
        if self.has_encoders and not traits.takes_encoders:
            its = f"{traits.engine}'s encoders"
            raise ValueError(f"connector {self.connector} has no encoders: {its} work in another way")
        if len(nouns) > MAX_BACKENDS:
            raise ValueError(f"{len(nouns)} instances are given, but {MAX_BACKENDS} is the limit")
        return self

    @model_validator(mode="after")
    def _tls_files_belong_together(self) -> Self:
        for name, section in (("listen", self.listen), ("admin", self.admin)):
            for option in ("tls_key", "tls_client_ca"):
                if section.tls_certificate is None and getattr(section, option) is not None:
                    raise ValueError(f"{name}.{option} is given without {name}.tls_certificate")
        if self.engines.client_key is not None and self.engines.client_certificate is None:
            raise ValueError("engines.client_key is given without engines.client_certificate")
        if self.admin.port is None and self.admin.tls_certificate is not None:
            raise ValueError(
                "admin.tls_certificate is given without admin.port: listen.tls_certificate serves all routes"
            )
        return self

    @model_validator(mode="after")
    def _decoders_can_call_back(self) -> Self:
        if self.layerwise.port + self.workers - 1 > 65535:
            raise ValueError(f"layerwise.port {self.layerwise.port} leaves no ports for {self.workers} workers")
        if self.connector_traits.needs_callback_port:
            self.callback_host  # noqa: B018 raises
        return self

    def instances_of(self, role: str) -> tuple[Endpoint, ...]:
        """Return the configured instances that start in a role, with elastic ones."""
        elastic = {endpoint.place: endpoint for endpoint in self.elastic.instances}
        starting = {
            role: [elastic.get(endpoint.place, endpoint) for endpoint in endpoints]
            for role, endpoints in (("prefill", self.prefill), ("decode", self.decode), ("encode", self.encode))
        }
        listed = {endpoint.place for endpoint in (*self.prefill, *self.decode)}
        for endpoint in self.elastic.instances:
            if endpoint.place not in listed:
                is_prefill = len(starting["prefill"]) <= len(starting["decode"])
                starting["prefill" if is_prefill else "decode"].append(endpoint)
        return tuple(starting[role])

    @property
    def has_encoders(self) -> bool:
        """Whether there is a stage of encoders."""
        return bool(self.encode or self.discovery.encode_dns or self.kubernetes.encode_selector)

    def needs(self, role: str) -> bool:
        """Whether nothing is served without an instance of this role."""
        return role == "decode" or (role == "prefill" and self.connector_traits.needs_prefillers)

    def may_find(self, role: str) -> bool:
        """Whether instances of a role may come from a source of discovery."""
        return self.discovery.may_list(role) or self.kubernetes.may_list(role)

    @property
    def fleet(self) -> str:
        """How many instances are configured, and how many sources may name others, for people."""
        prefillers, decoders = len(self.instances_of("prefill")), len(self.instances_of("decode"))
        parts = [format_count(prefillers, "prefiller"), format_count(decoders, "decoder")]
        if self.elastic.instances:
            parts.append(f"{len(self.elastic.instances)} of them elastic")
        if sources := self.discovery.sources + self.kubernetes.sources:
            parts.append(format_count(len(sources), "discovery source"))
        return ", ".join(parts)

    @property
    def connector_traits(self) -> ConnectorTraits:
        """The traits that the program reads instead of the connector's name."""
        return CONNECTOR_TRAITS[self.connector]

    @property
    def administration_host(self) -> str:
        """The address of the listener with the routes of administration."""
        return self.listen.host if self.admin.port is None else self.admin.host

    def has_tls(self, port: int) -> bool:
        """Whether the listener at a port of this gateway has a certificate."""
        if port == self.admin.probe_port:
            return False
        return (self.admin if port == self.admin.port else self.listen).tls_certificate is not None

    def needs_client_certificate(self, port: int) -> bool:
        """Whether the listener at a port of this gateway accepts only clients with a certificate."""
        return self.has_tls(port) and (self.admin if port == self.admin.port else self.listen).tls_client_ca is not None

    @property
    def access_warnings(self) -> tuple[str, ...]:
        """Sentences about open access for clients and closed or open access for administrators."""
        warnings = []
        if not self.engines.verify:
            warnings.append(
                "certificates of engines are not verified, so that another host can pose as an engine and read all "
                "prompts: set engines.ca_file in place of engines.verify: false"
            )
        if not is_loopback_host(self.listen.host) and self.auth.client_keys_file is None:
            warnings.append(
                f"every client that can reach {self.listen.host} is served without a key: set auth.client_keys_file, "
                "or make sure that only your clients can reach it"
            )
        if not is_loopback_host(self.administration_host) and self.auth.admin_key is None:
            warnings.append(
                f"administration is closed, because other hosts may reach {self.administration_host}: set "
                "auth.admin_key, or admin.port for a listener on this host alone"
            )
        elif self.admin.trust_local and self.admin.port is None and self.auth.admin_key is None:
            warnings.append(
                "every program on this host may administer, and with it every client of a reverse proxy on this host: "
                "unset admin.trust_local or set auth.admin_key, unless there is no such program"
            )
        return tuple(warnings)

    @property
    def callback_host(self) -> str:
        """The host for callbacks of decoders. Raises ValueError if it is every address."""
        host = self.layerwise.advertised_host or self.layerwise.host or self.listen.host
        if not host.strip("0.:"):
            raise ValueError(
                f"layerwise.advertised_host must be an address that decoders can reach: {host} is every address"
            )
        return host
