"""Every option: its name, type, default and meaning.

Frozen values; a part of the program is given the sub-model it needs. The text under a field is its documentation and
appears in `--help` and `configs/full.yaml`.
"""

# No `from __future__ import annotations` here: pydantic reads the annotations at run time.
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from proxy.settings.endpoints import Host, is_loopback
from proxy.settings.kinds import (
    AbsolutePath,
    Attempts,
    Delay,
    Endpoints,
    FilePath,
    ListenPort,
    LogLevel,
    Natural,
    Networks,
    Origins,
    PolicyName,
    Positive,
    Ratio,
    RouteGroups,
    Seconds,
    Secret,
    Workers,
)

# Each backend has a column in the scoreboard.
MAX_BACKENDS: Final = 1024


class Section(BaseModel):
    """What all sections share: frozen, no unknown options, a documented field each."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


class Listen(Section):
    """The address clients connect to, and what a client may use up."""

    host: Host = "127.0.0.1"
    """Host name or address to listen on; 0.0.0.0 is every IPv4 interface, :: every interface."""
    port: ListenPort = 1999
    """TCP port to listen on; 0 takes any free one."""
    max_body_bytes: Positive = 64 * 1024 * 1024
    """A larger request body is refused with status 413."""
    max_body_elements: Positive = 4 * 1024 * 1024
    """So is a JSON body of more elements than this, before it is read: numbers and literals count one each, strings and
    names 8, arrays and objects 16, and escapes in strings one. A million of them take up to 30 ms to read, in which
    nobody else is served."""
    header_seconds: Seconds = 10.0
    """Until the headers of a request have arrived, from its first byte or from the connection's opening."""
    body_seconds: Seconds = 60.0
    """Until the body of a request has arrived."""
    body_bytes_per_second: Natural = 1024
    """A body that arrives more slowly than this, after its first 5 seconds, is given up; 0: however slowly."""
    max_connections: Positive | None = None
    """Client connections a worker holds open, beyond which new ones are answered 503; null: 45 % of the file
    descriptors the process may have open."""
    keepalive_seconds: Seconds = 75.0
    """An idle client connection is closed after this long."""
    write_timeout_seconds: Seconds = 60.0
    """A client that takes nothing from its answer for this long is cut off."""
    cors_origins: Origins = ()
    """Origins of web pages that may use the clients' routes from a browser, like https://chat.example.com; * is every
    page there is. Never the routes of administrators."""
    backlog: Positive = 4096
    """Connections the kernel holds before they are accepted."""


class Admin(Section):
    """The routes for operators, and what they may do."""

    host: Host = "127.0.0.1"
    """Host name or address of the listeners for operators, if they have ports of their own."""
    port: ListenPort | None = None
    """TCP port of a listener for operators alone: administration and metrics are then only there, and the routes for
    probes here and there; null: everything is on the clients' port."""
    probe_port: ListenPort | None = None
    """TCP port on which /livez and /readyz are answered by a thread of their own, which a busy event loop cannot delay;
    null: none."""
    networks: Networks = (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
        *("::1/128", "fc00::/7"),
    )
    """Where instances that are added at run time may be; link-local, multicast and unspecified addresses and the
    metadata services of clouds never are."""


class Admission(Section):
    """How much work is let in. What no instance has room for waits here for a while, and then is refused."""

    max_running_prefill: Positive | None = None
    """Requests a prefiller works on at a time; null: as many as it says it can (max_num_seqs), otherwise any number."""
    max_running_decode: Positive | None = None
    """Requests a decoder works on at a time; null: as many as it says it can (max_num_seqs), otherwise any number."""
    max_waiting: Natural = 1024
    """Requests that wait for room in a worker; more are refused with status 503."""
    wait_seconds: Seconds = 60.0
    """A request that has waited for so long is refused with status 503. Instances that were up and take no connections
    are waited for as long, as they may only be restarting."""
    max_buffered_bytes: Positive = 1024 * 1024 * 1024
    """Request bodies a worker holds at a time, all together, with what their elements take in memory; more are refused
    with status 503."""


class Balance(Section):
    """How a backend is chosen among the eligible ones."""

    prefill_policy: PolicyName = "least_load"
    """Policy for prefillers: least_load, round_robin, power_of_two or random."""
    decode_policy: PolicyName = "least_load"
    """Policy for decoders: least_load, round_robin, power_of_two or random."""
    prefill_dp_ranks: Positive = 1
    """Data-parallel ranks behind the address of each vLLM prefiller, among which the gateway spreads its requests by
    the header X-data-parallel-rank; 1: the engine spreads them itself. With connector mooncake_bootstrap the engines
    tell."""
    decode_dp_ranks: Positive = 1
    """The same for decoders."""


class Cost(Section):
    """How the load of a request is estimated before its tokens are known."""

    bytes_per_token: Positive = 4
    """UTF-8 bytes of text that count as one token."""
    image_tokens: Natural = 1024
    """Tokens an image counts, whatever its bytes."""
    audio_tokens: Natural = 512
    """Tokens a piece of audio counts, whatever its bytes."""
    default_output_tokens: Natural = 256
    """Output tokens assumed for a request without a limit of its own."""


class Retry(Section):
    """What happens when a backend fails before the client has seen a byte."""

    max_attempts: Attempts = 3
    """Attempts per stage, the first one included; 0 counts as 1."""
    base_delay_seconds: Delay = 0.025
    """Longest wait before the second attempt; it doubles with each further one, and the real wait is drawn below it."""
    max_delay_seconds: Delay = Field(default_factory=lambda earlier: max(0.25, earlier["base_delay_seconds"]))
    """Where that doubling ends; by default 0.25, or base_delay_seconds where that is larger."""
    budget_share: Ratio = 0.2
    """Share of the requests in flight that may be repeated or taken up again at the same time; others wait for their
    turn. What could not even connect is not counted."""
    budget_least: Positive = 3
    """So many may be at any time."""
    budget_wait_seconds: Delay = 5.0
    """How long a request may wait for its turn to be repeated. An answer that had begun may wait for
    resume.deadline_seconds."""

    @model_validator(mode="after")
    def _cap_is_not_below_base(self) -> Self:
        if self.max_delay_seconds < self.base_delay_seconds:
            raise ValueError(
                f"max_delay_seconds {self.max_delay_seconds} is below base_delay_seconds {self.base_delay_seconds}"
            )
        return self


class Timeouts(Section):
    """How long to wait for an engine. Bytes alone are no answer: neither pieces of what is not whole, nor the comments,
    heartbeats and empty chunks of a stream.
    """

    connect_seconds: Seconds = 2.0
    """Until a connection to an engine is open."""
    prefill_seconds: Seconds = 300.0
    """Until a prefiller has answered, for a prompt of no tokens …"""
    prefill_seconds_per_1k_tokens: Delay = 1.0
    """… and so much more for every thousand of them."""
    handoff_seconds: Seconds = 60.0
    """From the prefiller's answer to the first bytes of a decoder's; at most half the time for which the prefiller
    keeps the KV cache."""
    first_token_seconds: Seconds = 300.0
    """Until a decoder's streamed answer begins, which includes fetching the KV cache."""
    answer_seconds: Seconds = 3600.0
    """Until a decoder's answer that is not streamed is there: engines send nothing of it before its end. At most
    first_token_seconds and a second for each token that its client allows."""
    idle_seconds: Seconds = 300.0
    """Between two pieces of a decoder's streamed answer."""


class Kv(Section):
    """The hand-over of the KV cache from prefiller to decoder."""

    on_missing: Literal["retry_prefill", "local", "error"] = "retry_prefill"
    """When a prefiller names no KV cache: retry_prefill asks another one, then lets the decoder compute a prompt of up
    to local_max_tokens by itself; local always lets the decoder compute it; error fails the request."""
    local_max_tokens: Natural = 2048
    """Longest prompt a decoder may compute by itself after retry_prefill did not help."""
    prefill_min_tokens: Natural = 0
    """A shorter prompt, as it is estimated, goes to a decoder alone, which computes it by itself; with connectors
    vllm_pull and vllm_store."""
    on_unsupported: Literal["error", "local"] = "error"
    """What no hand-over can serve, with vLLM's connectors: beam search, best_of larger than n, and log probabilities of
    the prompt (echo with logprobs, prompt_logprobs) with more than one token to generate. error refuses it; local has a
    decoder serve it alone, prompt included. With at most one token, log probabilities are told by a prefiller alone."""
    release: Literal["auto", "never"] = "auto"
    """KV that no decoder fetched, because its request failed or the client left: auto has a decoder release it where
    the engines can; never leaves it to the prefiller, which frees it after pin_seconds."""
    pin_seconds: Seconds | None = None
    """How long prefillers keep KV that nobody fetches, for the account of their memory; null: what engines of their
    version and KV connector do unless configured (30 with NixlConnector since vLLM 0.23, otherwise 480)."""


class Sglang(Section):
    """Engines of SGLang."""

    dp_size: Positive = 1
    """Data-parallel ranks of a prefiller (its --dp-size), among which the gateway spreads requests by their load; 1
    leaves that to chance."""


class Layerwise(Section):
    """Where decoders call the gateway back, with connector ascend_layerwise. Each worker has a port of its own."""

    host: Host | None = None
    """Host name or address to listen on; null: listen.host."""
    port: ListenPort = 0
    """TCP port of the first worker, behind which come those of the others; 0: each takes any free one."""
    advertised_host: Host | None = None
    """Host name or address at which decoders reach this gateway; null: the one that is listened on."""
    callback_seconds: Seconds = 60.0
    """Until a decoder has called back, which it does when it has room for the KV cache."""


class Mooncake(Section):
    """Prefillers with vLLM's own MooncakeConnector, with connector mooncake_bootstrap."""

    bootstrap_port: ListenPort = Field(default=8998, ge=1)
    """TCP port at which a prefiller tells of its engines (its VLLM_MOONCAKE_BOOTSTRAP_PORT), unless its own is given
    with its address."""


class Resume(Section):
    """What happens when a decoder is lost in the middle of an answer, or asks for recomputation."""

    mode: Literal["off", "restart-only", "exact"] = "exact"
    """exact goes on where the answer broke off, token by token, if the engines can; restart-only begins an answer again
    of which the client has nothing yet; off does neither."""
    max_attempts: Natural = 3
    """How often one answer may be taken up again."""
    deadline_seconds: Seconds = 30.0
    """How long to look for instances that can take it up."""
    chats: Literal["auto", "native", "ascend_private", "completions"] = "auto"
    """How chats go on from token ids: native is kv_transfer_params.prompt_token_ids of vLLM 0.27 and later,
    ascend_private the key of a vllm-ascend 0.26 patch, completions sends the ids to /v1/completions and parses the text
    here; auto chooses by the engines' version."""
    repeat_up_to_tokens: Natural = 32
    """An answer that is not streamed and cannot be longer than this is asked for again as a whole rather than watched
    token by token and taken up where it broke off; 0 watches all."""
    pressure_seconds: Delay = 5.0
    """A decoder that asked for recomputation gets no new request for this long, where another one can take it."""


class HealthChecks(Section):
    """How backends are asked whether they are well."""

    interval_seconds: Seconds = 5.0
    """Between two checks of a backend."""
    timeout_seconds: Seconds = 5.0
    """A check that takes longer has failed."""
    fall: Positive = 3
    """Failed checks in a row that make a backend unhealthy."""
    rise: Positive = 2
    """Passed checks in a row that make it healthy again."""
    jitter: Ratio = 0.2
    """Random share by which an interval is made longer or shorter, so that checks do not come in step."""
    changing_interval_seconds: Seconds = 1.0
    """Between two checks while the verdict is about to change."""
    path: AbsolutePath = "/health"
    """What is requested; status 200 passes."""
    eject_after: Positive = 5
    """Failed requests in a row for which a backend is ejected, whatever its health checks say."""
    eject_seconds: Seconds = 30.0
    """The first ejection lasts this long, the n-th in a row n times as long, each with some jitter. Then one request is
    tried."""
    max_eject_seconds: Seconds = Field(default_factory=lambda earlier: max(300.0, earlier["eject_seconds"]))
    """The longest ejection; by default 300, or eject_seconds where that is larger."""
    max_ejected_share: Ratio = 0.5
    """Share of a role's backends that failed requests may eject; the last one is never ejected."""
    stall_seconds: Seconds = 30.0
    """A backend that sends nothing for this long, on any of its streams, while others of its role do, is ejected, and
    its answers are taken up elsewhere; longer for one that has been silent for long before and went on."""
    slow_start_seconds: Delay = 30.0
    """A backend that came back, or was added, gets its full share only after this long; it begins with a tenth."""
    quarantine_after: Positive = 2
    """Hand-overs in a row that fail between a prefiller and a decoder for which the two are not paired for a while."""
    quarantine_seconds: Seconds = 60.0
    """That while."""
    transfer_interval_seconds: Delay = 15.0
    """So often at most a decoder's /metrics is read, after hand-overs to it, to see whether it fetches the KV cache or
    computes prompts once more; a quarter as often while all is well. 0: never."""


class Joining(Section):
    """Instances added at run time that do not answer yet."""

    max_attempts: Attempts = 3
    """Checks before an added instance is given up; 0 counts as 1."""
    interval_seconds: Seconds = 10.0
    """Between two of these checks."""


class Leaving(Section):
    """Instances that are removed, by an administrator or from the configuration."""

    evacuate_after_seconds: Delay | None = None
    """What a removed instance works on after so long is taken up by others, as if it had failed; null: it may come to
    its end there, however long that takes. /instances/remove may say otherwise (evacuate_after)."""


class Fanout(Section):
    """Requests with several prompts or samples, which are split into single units."""

    max_units: Positive = 1024
    """A request that would be split into more units is refused."""
    concurrency: Positive = 64
    """Units of one request that run at the same time, and items of a unit that are encoded at the same time."""


class Drain(Section):
    """What happens after SIGTERM."""

    not_ready_seconds: Delay = 5.0
    """Keep accepting for this long while /readyz already says no, so that load balancers can notice."""
    streams_seconds: Seconds = 300.0
    """Then let requests that are running finish for this long; the rest get an error."""


class Auth(Section):
    """Keys. They come from the environment or from files, never from the command line. A relative path begins where the
    configuration file is that has it, or in the working directory if the environment has it.
    """

    engine_api_key: Secret = None
    """Sent to engines as a bearer token; by default the environment's OPENAI_API_KEY; empty: none."""
    engine_api_key_file: FilePath = None
    """File that holds engine_api_key."""
    admin_key: Secret = None
    """Lets administrators in, wherever they are; none: only programs on this host may administer, and only where the
    listener is on a loopback address."""
    admin_key_file: FilePath = None
    """File that holds admin_key."""
    client_keys_file: FilePath = None
    """YAML file with the keys of clients and their limits, read again when it changes; none: clients need no key."""


class Log(Section):
    """The program's log."""

    level: LogLevel = "INFO"
    """Least severe level that is logged: DEBUG, INFO, WARNING, ERROR or CRITICAL."""
    format: Literal["auto", "text", "json"] = "auto"
    """text, json, or auto: text on a terminal and json elsewhere."""


class Settings(Section):
    """All options. Loading them from the command line, the environment and a file is `proxy.settings.load`."""

    prefill: Endpoints = ()
    """Prefillers, as host:port or host:first-last; none with connector plain. One with sglang_bootstrap or
    mooncake_bootstrap may be followed by its bootstrap port, as in `10.0.0.1:30000 8998`."""
    decode: Endpoints = ()
    """Decoders, as host:port or host:first-last."""
    encode: Endpoints = ()
    """Encoders, as host:port or host:first-last: vLLM engines that are sent the images, audio and video of a chat
    first, and share with the others what they make of them (--ec-transfer-config); none: prefillers encode them."""
    connector: Literal[
        "auto", "vllm_pull", "vllm_store", "mooncake_bootstrap", "sglang_bootstrap", "ascend_layerwise", "plain"
    ] = "vllm_pull"
    """How the KV cache travels: vllm_pull (the decoder fetches it), vllm_store (through a store that engines share),
    mooncake_bootstrap (vLLM's own MooncakeConnector, whose prefillers and decoders meet), sglang_bootstrap (SGLang's
    prefillers and decoders, which meet), ascend_layerwise (the prefiller sends it when the decoder has called back) or
    plain (every engine does both stages); auto asks the engines what they are, once, before it serves."""
    workers: Workers = 1
    """Processes that serve requests; auto is one per core."""
    worker_timeout_seconds: Seconds | None = 30.0
    """A worker that has stood still for so long is killed and replaced, where there are several; null: never."""
    passthrough: RouteGroups = ("tokenizer", "pooling")
    """Groups of routes that one engine answers alone: tokenizer (/tokenize …), pooling (/v1/embeddings …)."""
    listen: Listen = Listen()
    admin: Admin = Admin()
    admission: Admission = Admission()
    balance: Balance = Balance()
    cost: Cost = Cost()
    retry: Retry = Retry()
    timeouts: Timeouts = Timeouts()
    kv: Kv = Kv()
    sglang: Sglang = Sglang()
    layerwise: Layerwise = Layerwise()
    mooncake: Mooncake = Mooncake()
    resume: Resume = Resume()
    health: HealthChecks = HealthChecks()
    joining: Joining = Joining()
    leaving: Leaving = Leaving()
    fanout: Fanout = Fanout()
    drain: Drain = Drain()
    auth: Auth = Auth()
    log: Log = Log()

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
        if self.connector == "plain" and self.prefill:
            raise ValueError("connector plain has no prefillers: give every engine as a decoder")
        if self.connector == "sglang_bootstrap" and self.encode:
            raise ValueError("connector sglang_bootstrap has no encoders: those of SGLang are asked in another way")
        if len(nouns) > MAX_BACKENDS:
            raise ValueError(f"{len(nouns)} instances are given, but {MAX_BACKENDS} is the most there can be")
        return self

    @model_validator(mode="after")
    def _decoders_can_call_back(self) -> Self:
        if self.layerwise.port + self.workers - 1 > 65535:
            raise ValueError(f"layerwise.port {self.layerwise.port} leaves no ports for {self.workers} workers")
        if self.connector == "ascend_layerwise":
            self.callback_host  # noqa: B018 raises
        return self

    @property
    def administration_host(self) -> str:
        """Where the listener is that has the routes of administration."""
        return self.listen.host if self.admin.port is None else self.admin.host

    @property
    def doors(self) -> tuple[str, ...]:
        """What an operator should know of who is let in and who is not, a sentence each."""
        told = []
        if not is_loopback(self.listen.host) and self.auth.client_keys_file is None:
            told.append(
                f"whoever reaches {self.listen.host} is served, as clients need no key: set auth.client_keys_file, or "
                "see to it that only clients reach it"
            )
        if not is_loopback(self.administration_host) and self.auth.admin_key is None:
            told.append(
                f"nobody may administer, as others than this host may reach {self.administration_host}: set "
                "auth.admin_key, or admin.port for a listener on this host alone"
            )
        return tuple(told)

    @property
    def callback_host(self) -> str:
        """What decoders are told to call back, with connector ascend_layerwise. Raises ValueError if that is none."""
        host = self.layerwise.advertised_host or self.layerwise.host or self.listen.host
        if not host.strip("0.:"):
            raise ValueError(f"layerwise.advertised_host must be where decoders can call back: {host} is every address")
        return host
