"""The flags of `pdproxy mock-engine`. Each flag sets one field of `Options`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, get_args

from proxy.settings.mistakes import Parser
from proxy.sim.engine.faults import FAULT_ACTIONS
from proxy.sim.hardware.machines import MACHINES
from proxy.sim.options import AtSigterm, LoadFailurePolicy, Options, ProtocolName, SimRole
from proxy.sim.profile import ALL_PROFILES, ConnectorName
from proxy.tools.flag_numbers import positive_whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

_DESCRIPTION = """\
Run a simulated engine for demonstrations, tests and benchmarks. It has the HTTP interface of vLLM or SGLang, and
simulated prefillers and decoders hand KV cache over by real sockets. Its answers are deterministic."""

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


def _make_epilog() -> str:
    return _EPILOG + "\n".join(f"    {name:22} {text}" for name, text in FAULT_ACTIONS.items())


def _parse_port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError("must be between 0 and 65535")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    default = Options()
    parser = Parser(
        prog="pdproxy mock-engine",
        description=_DESCRIPTION,
        epilog=_make_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="Address to listen on. Default: %(default)s.")
    add(
        "--port",
        type=_parse_port,
        default=0,
        help="TCP port to listen on. 0 selects a free port and prints it. Default: 0.",
    )
    add("--role", choices=get_args(SimRole), default=default.role, help="Role of the engine. Default: %(default)s.")
    add("--model", default=default.model, help="Name of the served model. Default: %(default)s.")
    add(
        "--adapter",
        dest="adapters",
        action="append",
        default=[],
        metavar="NAME",
        help="Name of a loaded adapter (LoRA). Repeatable.",
    )
    add(
        "--profile",
        dest="profile_name",
        choices=sorted(ALL_PROFILES),
        default=default.profile_name,
        help="Engine version to simulate, with its wire format and defects. Default: %(default)s.",
    )
    add(
        "--connector",
        dest="connector_name",
        choices=get_args(ConnectorName),
        help="Connector whose KV parameters to use. Default: nixl from v0.33 on, otherwise mooncake (vllm-ascend).",
    )
    _add_protocol_flags(add, default)
    add("--api-key", help="Key that requests to paths under /v1 must have.")
    add(
        "--max-model-len",
        type=positive_whole_number,
        default=default.max_model_len,
        metavar="TOKENS",
        help="Maximum length of prompt and answer, in tokens. Default: %(default)s.",
    )
    add(
        "--default-max-tokens",
        type=positive_whole_number,
        default=default.default_max_tokens,
        metavar="TOKENS",
        help="Maximum length of a chat's answer if the request has no limit, in tokens. Default: %(default)s.",
    )
    add(
        "--block-size",
        type=positive_whole_number,
        default=default.block_size,
        metavar="TOKENS",
        help="Size of a KV block, in tokens. Default: %(default)s.",
    )
    add(
        "--num-gpu-blocks",
        type=positive_whole_number,
        default=default.num_gpu_blocks,
        metavar="N",
        help="Number of KV blocks. Default: %(default)s.",
    )
    add("--prefill-ms-per-1k-tokens", type=float, default=0.0, metavar="MS", help="Prefill time per 1,000 tokens.")
    add("--decode-step-ms", type=float, default=0.0, metavar="MS", help="Time of one decode step.")
    add("--decode-step-ms-per-seq", type=float, default=0.0, metavar="MS", help="Time that each running sequence adds.")
    add(
        "--machine",
        choices=MACHINES,
        help="Published performance profile of this machine. Overrides all other timing options.",
    )
    add(
        "--max-num-seqs",
        type=positive_whole_number,
        default=default.max_num_seqs,
        metavar="N",
        help="Maximum number of running sequences. Further ones wait. Default: %(default)s.",
    )
    add(
        "--max-num-queued-reqs",
        type=positive_whole_number,
        metavar="N",
        help="Maximum number of running and waiting requests. Further ones get 503.",
    )
    add(
        "--tokens-per-step",
        type=positive_whole_number,
        default=default.tokens_per_step,
        metavar="N",
        help="Tokens per decode step, as with speculative decoding. Default: %(default)s.",
    )
    add(
        "--stream-interval",
        type=positive_whole_number,
        default=default.stream_interval,
        metavar="N",
        help="Tokens per chunk of a stream. Default: %(default)s.",
    )
    add(
        "--eos-after",
        type=positive_whole_number,
        metavar="TOKENS",
        help="Approximate length of answers, in tokens.",
    )
    add(
        "--first-token-eos",
        action="store_true",
        help="End answers after the first token, unless min_tokens forbids it.",
    )
    add(
        "--pin-seconds",
        type=float,
        metavar="SECONDS",
        help="Time for which unfetched KV cache is kept. Default: that of the version.",
    )
    add(
        "--kv-load-failure-policy",
        choices=get_args(LoadFailurePolicy),
        default=default.kv_load_failure_policy,
        help="Action of a decoder that cannot fetch the KV cache. Default: %(default)s.",
    )
    add(
        "--prompt-tokens-details",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Report cached_tokens. Default: on.",
    )
    add(
        "--reasoning-parser",
        choices=("", "kimi_k2"),
        default=default.reasoning_parser,
        help="Parser of reasoning; empty: none. Default: %(default)s.",
    )
    add(
        "--tool-call-parser",
        choices=("", "kimi_k2"),
        default=default.tool_call_parser,
        help="Parser of tool calls. Default: none.",
    )
    add(
        "--dev-mode",
        action="store_true",
        help="Report the configuration at /server_info, as with VLLM_SERVER_DEV_MODE=1.",
    )
    add(
        "--private-prompt-ids",
        action="store_true",
        help="Accept the prompt of a chat as token IDs under the key of vllm-ascend.",
    )
    add(
        "--clock-offset-seconds",
        type=float,
        default=default.clock_offset_seconds,
        metavar="SECONDS",
        help="Time by which the engine's clock is ahead.",
    )
    add(
        "--at-sigterm",
        choices=get_args(AtSigterm),
        default=default.at_sigterm,
        help="Action at SIGTERM: exit, leave answers open and silent, abort them, or end as after a crash of the core."
        " Default: %(default)s.",
    )
    add(
        "--keep-alive-seconds",
        type=float,
        default=default.keep_alive_seconds,
        metavar="SECONDS",
        help="Time after which an idle connection is closed. Default: %(default)s.",
    )
    add("--enable-request-id-headers", dest="request_id_headers", action="store_true", help="Return X-Request-Id.")
    add(
        "--bidirectional-kv-xfer",
        action="store_true",
        help="Report the KV cache of decoders, as with NIXL's bidirectional_kv_xfer.",
    )
    add(
        "--allocates-after-prefill",
        action="store_true",
        help="Report the allocation policy prefill_complete, as decoders of SGLang do.",
    )
    add("--ec-role", choices=("producer", "consumer"), default="", help="Role in the transfer of encoded media.")
    add(
        "--ec-connector",
        choices=("ECCPUConnector", "ECMooncakeConnector"),
        default="ECCPUConnector",
        help="Connector for encoded media. Default: ECCPUConnector.",
    )
    add(
        "--request-id-randomization",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Randomize internal IDs. Default: on.",
    )
    add("--kv-host", metavar="HOST", help="Announced address for KV transfers. Default: --host.")
    add(
        "--unreachable-ports",
        type=_parse_ports,
        default=default.unreachable_ports,
        metavar="PORT[,PORT…]",
        help="Ports of prefillers that this decoder cannot reach for KV transfers.",
    )
    return parser


def _parse_ports(text: str) -> frozenset[int]:
    return frozenset(map(_parse_port, text.split(",")))


def _add_protocol_flags(add: Callable[..., Any], default: Options) -> None:
    add(
        "--protocol",
        choices=get_args(ProtocolName),
        help="Protocol of the KV handoff: pull, push and transfer of vLLM, bootstrap of SGLang, layerwise of "
        "vllm-ascend, a store, or none. Default: that of the profile.",
    )
    add(
        "--bootstrap-port",
        type=_parse_port,
        default=default.bootstrap_port,
        metavar="PORT",
        help="TCP port of a prefiller's bootstrap server, with the protocols bootstrap and transfer. 0 selects a free "
        "port and prints it.",
    )
    add(
        "--dp-size",
        type=positive_whole_number,
        default=default.dp_size,
        metavar="N",
        help="Number of data-parallel ranks. Default: %(default)s.",
    )
    add(
        "--enable-pd-role-switch",
        dest="pd_role_switch",
        action="store_true",
        help="Exchange the role at /pd_role_switch, as SGLang does.",
    )
    add(
        "--reports-only-role-at-start",
        action="store_true",
        help="Report the role of the start alone at /server_info, as SGLang before 0.5.23.",
    )
    add(
        "--free-gpu-gb",
        type=float,
        default=default.free_gpu_gb,
        metavar="GB",
        help="GPU memory that is free for the CUDA graphs of a prefiller that becomes a decoder. Default: %(default)s.",
    )
    add(
        "--waiting-seconds",
        type=float,
        default=default.waiting_seconds,
        metavar="SECONDS",
        help="Time for which a leg waits for its partner. Default: %(default)s.",
    )
    add(
        "--handshake-seconds",
        type=float,
        default=default.handshake_seconds,
        metavar="SECONDS",
        help="SGLang: time for which a decoder looks for an unknown bootstrap server. Default: %(default)s.",
    )
    add(
        "--metaserver-delay-seconds",
        type=float,
        default=default.metaserver_delay_seconds,
        metavar="SECONDS",
        help="Layerwise: time before a decoder calls back.",
    )
    add("--kv-events-config", metavar="JSON", help="Configuration of KV events, as for engines.")
    add(
        "--store",
        metavar="DIRECTORY",
        help="Store: directory of the store. Engines with the same directory share KV cache.",
    )


def parse_arguments(argv: list[str]) -> tuple[str, int, Options]:
    """Parse the flags and return host, port and options. Raises SettingsError for a mistake."""
    values = vars(build_parser().parse_args(argv))
    host, port = values.pop("host"), values.pop("port")
    return host, port, Options(**values)
