"""The flags of `pdproxy mock-engine`. Each flag sets one field of `Options`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, get_args

from proxy.settings.mistakes import Parser
from proxy.sim.engine.faults import ACTIONS
from proxy.sim.hardware.machines import MACHINES
from proxy.sim.options import AtSigterm, LoadFailurePolicy, Options, ProtocolName, SimRole
from proxy.sim.profile import ALL_PROFILES, ConnectorName
from proxy.tools.flag_numbers import natural

if TYPE_CHECKING:
    from collections.abc import Callable

_DESCRIPTION = """\
A simulated engine, of vLLM or SGLang: a deterministic model behind the engine's HTTP interface, with KV hand-over
between a simulated prefiller and decoder over real sockets. For demonstrations, tests and benchmarks; it computes
nothing."""

_EPILOG = """\
control endpoints:
  POST   /_mock/faults   add a fault rule (a JSON object or a list of them)
  DELETE /_mock/faults   remove all rules
  GET    /_mock/state    requests seen, counters, pins
  GET    /_mock/pins     KV kept for decoders

fault rules: {"action": NAME, conditions, parameters}
  conditions   path, request_id (contained text), every (n-th), skip (first n), probability, times
  parameters   status, body, headers, seconds, tokens, merged, size, done
  actions
"""


def _epilog() -> str:
    return _EPILOG + "\n".join(f"    {name:22} {text}" for name, text in ACTIONS.items())


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError("must be between 0 and 65535")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    default = Options()
    parser = Parser(
        prog="pdproxy mock-engine",
        description=_DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=0, help="port to listen on; 0 takes a free one and prints it")
    add("--role", choices=get_args(SimRole), default=default.role, help="what it is used as (default: %(default)s)")
    add("--model", default=default.model, help="served model name (default: %(default)s)")
    add(
        "--adapter",
        dest="adapters",
        action="append",
        default=[],
        metavar="NAME",
        help="an adapter (LoRA) that is loaded; repeatable",
    )
    add(
        "--profile",
        dest="profile_name",
        choices=sorted(ALL_PROFILES),
        default=default.profile_name,
        help="the version whose wire format and defects to show (default: %(default)s)",
    )
    add(
        "--connector",
        dest="connector_name",
        choices=get_args(ConnectorName),
        help="shape and rules of the KV params; default: nixl from v0.33 on, mooncake (vllm-ascend) before",
    )
    _add_protocol_flags(add, default)
    add("--api-key", help="require this key for paths under /v1")
    add("--max-model-len", type=natural, default=default.max_model_len, metavar="TOKENS")
    add(
        "--default-max-tokens",
        type=natural,
        default=default.default_max_tokens,
        metavar="TOKENS",
        help="chat without max",
    )
    add("--block-size", type=natural, default=default.block_size, metavar="TOKENS")
    add("--num-gpu-blocks", type=natural, default=default.num_gpu_blocks, metavar="N", help="KV capacity")
    add("--prefill-ms-per-1k-tokens", type=float, default=0.0, metavar="MS", help="prefill time")
    add("--decode-step-ms", type=float, default=0.0, metavar="MS", help="time of one decode step")
    add("--decode-step-ms-per-seq", type=float, default=0.0, metavar="MS", help="added per running sequence")
    add(
        "--machine",
        choices=MACHINES,
        help="as fast as there, in batches and KV memory as there, whatever else is said",
    )
    add(
        "--max-num-seqs",
        type=natural,
        default=default.max_num_seqs,
        metavar="N",
        help="more than these wait",
    )
    add("--max-num-queued-reqs", type=natural, metavar="N", help="more than these, waiting or not, are answered 503")
    add(
        "--tokens-per-step",
        type=natural,
        default=default.tokens_per_step,
        metavar="N",
        help="as speculative decoding does",
    )
    add(
        "--stream-interval",
        type=natural,
        default=default.stream_interval,
        metavar="N",
        help="tokens per chunk",
    )
    add(
        "--eos-after",
        type=natural,
        metavar="TOKENS",
        help="answers end after about this number of tokens",
    )
    add("--first-token-eos", action="store_true", help="the first token ends the answer unless min_tokens forbids it")
    add("--pin-seconds", type=float, metavar="SECONDS", help="how long unpulled KV is kept; default: the version's")
    add(
        "--kv-load-failure-policy",
        choices=get_args(LoadFailurePolicy),
        default=default.kv_load_failure_policy,
        help="what a decoder does when KV cannot be fetched (default: %(default)s)",
    )
    add("--prompt-tokens-details", action=argparse.BooleanOptionalAction, default=True, help="report cached_tokens")
    add("--reasoning-parser", choices=("", "kimi_k2"), default=default.reasoning_parser, help="(default: %(default)s)")
    add("--tool-call-parser", choices=("", "kimi_k2"), default=default.tool_call_parser, help="default: none")
    add(
        "--dev-mode", action="store_true", help="tell the configuration at /server_info, as VLLM_SERVER_DEV_MODE=1 does"
    )
    add("--private-prompt-ids", action="store_true", help="a chat's prompt may be ids under vllm-ascend's own key")
    add(
        "--clock-offset-seconds",
        type=float,
        default=default.clock_offset_seconds,
        metavar="SECONDS",
        help="how much its clock is ahead",
    )
    add(
        "--at-sigterm",
        choices=get_args(AtSigterm),
        default=default.at_sigterm,
        help="exit, or stop as vLLM may: leave its answers open without a word, abort them, or fail them"
        " (default: %(default)s)",
    )
    add(
        "--keep-alive-seconds",
        type=float,
        default=default.keep_alive_seconds,
        metavar="SECONDS",
        help="an idle connection is closed after this long (default: %(default)s)",
    )
    add("--enable-request-id-headers", dest="request_id_headers", action="store_true", help="echo X-Request-Id")
    add(
        "--bidirectional-kv-xfer",
        action="store_true",
        help="a decoder reports its own KV cache (NIXL's bidirectional_kv_xfer)",
    )
    add("--ec-role", choices=("producer", "consumer"), default="", help="role in the transfer of encoded media")
    add("--request-id-randomization", action=argparse.BooleanOptionalAction, default=True, help="of internal ids")
    add("--kv-host", metavar="HOST", help="address announced for pulling KV; default: --host")
    add(
        "--unreachable-ports",
        type=_ports,
        default=default.unreachable_ports,
        metavar="PORT[,PORT…]",
        help="prefillers to which this decoder has no route, for pulling KV",
    )
    return parser


def _ports(text: str) -> frozenset[int]:
    return frozenset(map(_port, text.split(",")))


def _add_protocol_flags(add: Callable[..., Any], default: Options) -> None:
    add(
        "--protocol",
        choices=get_args(ProtocolName),
        help="how KV travels: vLLM's pull (the default), SGLang's bootstrap (the default of its profile), layerwise of "
        "vllm-ascend, the transfer ids of vLLM's MooncakeConnector, a store, or not at all",
    )
    add(
        "--bootstrap-port",
        type=_port,
        default=default.bootstrap_port,
        help="a prefiller's second port, with the protocols bootstrap and transfer; 0 takes a free one and prints it",
    )
    add("--dp-size", type=natural, default=default.dp_size, metavar="N", help="data-parallel ranks")
    add(
        "--waiting-seconds",
        type=float,
        default=default.waiting_seconds,
        metavar="SECONDS",
        help="how long a leg waits for its partner (default: %(default)s)",
    )
    add(
        "--handshake-seconds",
        type=float,
        default=default.handshake_seconds,
        metavar="SECONDS",
        help="SGLang: how long a decoder looks for a bootstrap server it does not know (default: %(default)s)",
    )
    add(
        "--metaserver-delay-seconds",
        type=float,
        default=default.metaserver_delay_seconds,
        metavar="SECONDS",
        help="layerwise: how long a decoder queues before it calls back",
    )
    add("--kv-events-config", metavar="JSON", help="publish KV events, as engines do that are given this")
    add("--store", metavar="DIRECTORY", help="store: the directory that stands for it; engines that share it share KV")


def parse_arguments(argv: list[str]) -> tuple[str, int, Options]:
    """Parse the flags and return host, port and options. Raises SettingsError for a mistake."""
    values = vars(build_parser().parse_args(argv))
    host, port = values.pop("host"), values.pop("port")
    return host, port, Options(**values)
