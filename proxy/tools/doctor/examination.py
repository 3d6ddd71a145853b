"""Runs the examination: query engines, send canaries, run the checks."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final, TypeVar

from proxy.balancer.recognition import EngineReport, recognise_connector
from proxy.common.backend import Backend, Role
from proxy.connectors.releaser import KvTransfer
from proxy.fleet.canary import Canary, CanaryPrompt, CanaryResult, prompt_bytes
from proxy.fleet.discovery.facts import (
    MODELS_PATH,
    SERVER_INFO_PATH,
    SERVER_INFO_TIMEOUT_SECONDS,
    VERSION_PATH,
    make_engine_facts,
    update_setup,
)
from proxy.fleet.discovery.sources import SOURCES
from proxy.fleet.discovery.watcher import load_sources_once
from proxy.fleet.inspector import fetch_metrics
from proxy.observe.metrics import Metrics
from proxy.process.shared import ListeningSockets, create_shared_state
from proxy.process.supervisor.detection import replace_connector
from proxy.process.supervisor.listening import PortInUse, create_listener
from proxy.process.worker.applications import callback_limits, make_application, make_http_listener
from proxy.process.worker.balancing import Balancing, build_balancing
from proxy.process.worker.basis import LiveConfiguration, WorkerBasis
from proxy.process.worker.engines import ConnectorBundle, EngineClients, build_connector, build_engine_clients
from proxy.settings import LoadedSettings, Settings, SettingsError
from proxy.tools.doctor.chats import ChatAnswers, check_parsers, make_chat_body, rejects_tools, separates_reasoning
from proxy.tools.doctor.engine import check_engines, good_finding
from proxy.tools.doctor.examined import IDLE_SECONDS, Examined, Fleet, compared_options
from proxy.tools.doctor.findings import Finding, Severity
from proxy.tools.doctor.fleet import check_fleet, group_by_models
from proxy.tools.doctor.pair import CanaryResults, check_pairs
from proxy.upstream import (
    AddressProblem,
    BufferedResponse,
    EngineClient,
    EngineRequestError,
    HostNames,
    describe_connect_error,
)
from proxy.wire.exposition import parse_completed_work, parse_prompt_tokens, parse_rank_count, parse_start_time
from proxy.wire.ids import make_request_id
from proxy.wire.openai import Api, engine_error_text
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence

    from proxy.balancer.engines import EngineKeys
    from proxy.balancer.roster import Roster

_T = TypeVar("_T")
_PAIRS_AT_ONCE: Final = 8
_SOURCE_SECONDS: Final = 10.0
_ENGINES_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminationOptions:
    """Canaries of an examination, and its time limits."""

    canary_seconds: float
    """Limit for the answer to a canary."""
    canary_tokens: int
    """Length of a canary's prompt."""
    canaries_per_pair: int = 1
    """Canaries for each pair of instances; 0: engines generate nothing."""
    idle_seconds: float = IDLE_SECONDS
    """Time for which a connection is left idle before it is used again."""


class Examination:
    """Examines the instances of a configuration."""

    def __init__(
        self,
        loaded: LoadedSettings,
        options: ExaminationOptions,
        *,
        more: Callable[[Fleet], Iterable[Finding]] = lambda _: (),
        progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        """Create the examination.

        Args:
            loaded: The configuration.
            options: What to ask engines.
            more: Returns the findings of further checks.
            progress: Called with a noun, how many of these are done, and how many there are.
        """
        self._loaded = loaded
        self._canary_seconds = options.canary_seconds
        self._canary_tokens = options.canary_tokens
        self._canaries_per_pair = options.canaries_per_pair
        self._idle_seconds = options.idle_seconds
        self._more = more
        self._progress = progress

    async def run(self) -> list[Finding]:
        """Run the examination and return all findings. Everything is closed at return."""
        async with AsyncExitStack() as stack:
            callbacks: list[socket.socket] = []
            listeners = stack.enter_context(ListeningSockets(socket.socket(), callbacks=callbacks))
            shared = create_shared_state(self._loaded, lambda: self._loaded, listeners)
            live = LiveConfiguration(shared.configuration.current_snapshot())
            basis = WorkerBasis(shared=shared, worker_number=0, live_configuration=live, metrics=Metrics())
            balancing = build_balancing(basis)
            lines = await stack.enter_async_context(build_engine_clients(basis, balancing))
            settings = self._loaded.settings
            not_found = await _add_discovered_instances(shared.roster, settings)
            asker = EngineAsker(
                lines.host_names, lines.engine_client, balancing.engine_keys, settings, self._idle_seconds
            )
            fleet = Fleet(settings=settings, keys=balancing.engine_keys, engines=await self._ask(asker, balancing))
            fleet, found = self._with_connector(fleet)
            found += not_found
            fleet = await _check_bootstraps(fleet, asker)
            found += [*check_engines(fleet), *check_fleet(fleet), *self._more(fleet)]
            told = {finding.subject for finding in found if finding.severity > Severity.NOTE}
            spoilt = {finding.subject for finding in found if finding.severity is Severity.FAILURE}
            found = [good_finding(engine) for engine in fleet.engines if engine.subject not in told] + found
            fit = [engine for engine in fleet.told if engine.is_healthy and engine.subject not in spoilt]
            if self._canaries_per_pair and fleet.settings.connector != "auto":
                live.apply_snapshot(replace(live.current_snapshot, settings=_settings_for_canaries(fleet.settings)))
                for engine in fit:  # connectors need these facts; in a gateway the prober sets them
                    balancing.health.on_probe(engine.backend, has_passed=True, reason="passed its health check")
                    balancing.health.set_engine_facts(engine.backend, engine.facts)
                async with _run_connector(basis, balancing, lines, callbacks) as link:
                    for alike in group_by_models(fit):
                        found += await self._send_canaries(link, alike)
        return found

    async def _ask(self, asker: EngineAsker, balancing: Balancing) -> Sequence[Examined]:
        pools = (balancing.pools.prefill, balancing.pools.decode, balancing.pools.encode)
        backends = [backend for pool in pools if pool is not None for backend in pool.all_backends()]
        room = asyncio.Semaphore(_ENGINES_AT_ONCE)
        done = 0

        async def examine(backend: Backend) -> Examined:
            nonlocal done
            async with room:
                examined = await asker.examine(backend)
            done += 1
            self._progress("instances asked", done, len(backends))
            return examined

        return await asyncio.gather(*map(examine, backends))

    def _with_connector(self, fleet: Fleet) -> tuple[Fleet, list[Finding]]:
        """Replace connector `auto` by the detected one; return the fleet and the findings."""
        settings = fleet.settings
        if settings.connector != "auto":
            return fleet, []
        told = [engine for engine in fleet.told if engine.is_healthy]
        reports = [
            EngineReport(each.backend.role, each.backend.name, each.facts.identity, each.backend.is_elastic)
            for each in told
        ]
        has_prefillers = bool(settings.instances_of(Role.PREFILL))
        try:
            if has_prefillers and {report.role for report in reports} != {Role.PREFILL, Role.DECODE}:
                raise SettingsError("connector auto: not every role has an instance that reports its software")
            connector = recognise_connector(reports).connector_name if has_prefillers else "plain"
            settings = replace_connector(self._loaded, connector).settings
        except SettingsError as error:
            hint = "correct the instances, or set connector explicitly"
            return fleet, [Finding(Severity.FAILURE, "connector", "gateway", str(error), hint)]
        found = Finding(Severity.NOTE, "connector", "gateway", f"connector auto is {connector}")
        return replace(fleet, settings=settings), [found]

    async def _send_canaries(self, link: ConnectorBundle, fit: Sequence[Examined]) -> list[Finding]:
        """Send canaries. `fit`: compatible engines of one model, at least one."""
        settings = link.connector_context.live.settings
        takes_prefillers = settings.connector_traits.takes_prefillers
        prefillers = [engine for engine in fit if engine.backend.role is Role.PREFILL]
        decoders = [engine for engine in fit if engine.backend.role is Role.DECODE]
        if not decoders or (takes_prefillers and not prefillers) or not fit[0].serves:
            return []
        lengths = [engine.facts.max_model_len for engine in fit if engine.facts.max_model_len is not None]
        size = prompt_bytes(self._canary_tokens, settings.cost.bytes_per_token, lengths)
        prompt = CanaryPrompt.make_prompt(min(fit[0].serves), size)
        canary = Canary(link.connector, link.connector_context, prompt, self._canary_seconds)
        pairs = [(p.backend, d.backend) for p in prefillers for d in decoders] if takes_prefillers else []
        firsts = {prefiller: (decoder, make_request_id()) for prefiller, decoder in reversed(pairs)}
        """The first decoder of each prefiller, and the salt of the prompt that the prefiller gets again at the end."""
        salts = dict.fromkeys(pairs) | {(prefiller, decoder): salt for prefiller, (decoder, salt) in firsts.items()}
        total = len(pairs) * self._canaries_per_pair + len(firsts) + len(decoders)
        results: list[CanaryResult] = []
        alone: dict[Backend, CanaryResult] = {}
        for some in [some for _ in range(self._canaries_per_pair) for some in group_disjoint_pairs(pairs)]:
            results += await asyncio.gather(*(canary.check_pair(*pair, salts[pair]) for pair in some))
            self._progress("canaries", len(results), total)
        done = len(results)
        repeated: list[CanaryResult] = []
        for some in group_disjoint_pairs([(prefiller, decoder) for prefiller, (decoder, _) in firsts.items()]):
            repeated += await asyncio.gather(*(canary.check_pair(*pair, salts[pair]) for pair in some))
            self._progress("canaries", done + len(repeated), total)
        done += len(repeated)
        # Runs last: an engine that ignores the salt caches the prompt.
        for few in _split_into_chunks([decoder.backend for decoder in decoders], _PAIRS_AT_ONCE):
            for result in await asyncio.gather(*map(canary.check_decoder, few)):
                if result is not None:
                    alone[result.decoder] = result
            done += len(few)
            self._progress("canaries", done, total)

        def lease_seconds(prefiller: Backend) -> float | None:
            has_leases = settings.connector_traits.counts_expired_leases
            return link.kv_releaser.pin_seconds(prefiller, KvTransfer.NIXL) if has_leases else None

        canaries = CanaryResults(
            settings=settings,
            pairs=results,
            repeated=repeated,
            alone=alone,
            max_tokens={each.backend: each.facts.max_model_len for each in fit if each.facts.max_model_len is not None},
            lease_seconds=lease_seconds,
        )
        good = {backend for backend, result in alone.items() if not result.problem_text}
        good.update(result.prefiller for result in canaries.answered if result.prefiller is not None)
        chats = await self._send_chats(link, [engine for engine in fit if engine.backend in good])
        return [*check_pairs(canaries), *check_parsers(chats)]

    async def _send_chats(self, link: ConnectorBundle, engines: Sequence[Examined]) -> list[ChatAnswers]:
        """Send a chat to each engine of vLLM, which does not report its parsers. SGLang reports its own."""
        asked = [engine for engine in engines if engine.facts.identity.engine_kind == "vLLM"]
        found: list[ChatAnswers] = []
        if len(asked) < 2:
            return found
        for few in _split_into_chunks(asked, _PAIRS_AT_ONCE):
            found += await asyncio.gather(*(self._chat(link, engine) for engine in few))
            self._progress("chats", len(found), len(asked))
        return found

    async def _chat(self, link: ConnectorBundle, engine: Examined) -> ChatAnswers:
        """Return the answers of an engine to chats. A failed request leaves them unknown."""
        backend, context = engine.backend, link.connector_context

        async def ask(*, has_tool: bool) -> BufferedResponse:
            body = dumps(make_chat_body(min(engine.serves), backend.role, has_tool=has_tool))
            headers = context.keys.credential_headers(backend)
            return await context.client.post_json(backend.url, Api.CHAT.path, self._canary_seconds, body, headers)

        try:
            answer = await ask(has_tool=True)
            rejected = rejects_tools(answer.status, answer.body)
            if rejected and backend.role is Role.DECODE:
                answer = await ask(has_tool=False)
        except EngineRequestError:
            return ChatAnswers(engine=engine)
        is_answered = answer.status == 200 and backend.role is Role.DECODE
        return ChatAnswers(
            engine=engine,
            rejects_tools=rejected,
            separates_reasoning=separates_reasoning(answer.parsed_json_or_none) if is_answered else None,
        )


async def _check_bootstraps(fleet: Fleet, asker: EngineAsker) -> Fleet:
    """Check the bootstrap servers of prefill instances and return the updated fleet."""

    async def look(engine: Examined) -> Examined:
        place = bootstrap_address(engine, fleet.settings) if engine.is_healthy else None
        if place is None or not (problem := await asker.connect_problem(*place)):
            return engine
        return replace(engine, bootstrap=f"cannot connect to its bootstrap server at port {place[1]} ({problem})")

    return replace(fleet, engines=await asyncio.gather(*map(look, fleet.engines)))


@asynccontextmanager
async def _run_connector(
    basis: WorkerBasis, balancing: Balancing, lines: EngineClients, callbacks: list[socket.socket]
) -> AsyncIterator[ConnectorBundle]:
    """Run the connector, with its callback port if it needs one."""
    settings = basis.settings
    async with AsyncExitStack() as stack:
        if settings.connector_traits.needs_callback_port:
            host = settings.layerwise.host or settings.listen.host
            try:
                callbacks.append(create_listener(host, settings.layerwise.port))
            except PortInUse:  # a running gateway has it
                callbacks.append(create_listener(host, 0))
        link = await stack.enter_async_context(build_connector(basis, balancing, lines))
        if callbacks:
            app = make_application(basis)
            app.add_routes(link.connector.routes())
            front = await stack.enter_async_context(make_http_listener(basis, app, callback_limits))
            await front.listen_on(callbacks[0])
        yield link


async def _add_discovered_instances(roster: Roster, settings: Settings) -> list[Finding]:
    """Add discovered instances to the roster; return findings for failed sources and empty roles."""
    problems = await load_sources_once(SOURCES, roster, settings, _SOURCE_SECONDS)
    found = [
        Finding(Severity.FAILURE, "source", origin, words, "its instances were not examined")
        for origin, words in problems.items()
    ]
    if not problems:
        found += [
            Finding(
                Severity.FAILURE,
                "source",
                role,
                "no discovery source lists an instance",
                "check the sources, or start instances of this role",
            )
            for role in Role
            if settings.may_find(role) and settings.needs(role) and not roster.members_of_role(role)
        ]
    return found


def _settings_for_canaries(settings: Settings) -> Settings:
    """Return settings under which every canary uses a KV handoff and is sent once."""
    kv = settings.kv.model_copy(update={"on_missing": "error", "prefill_min_tokens": 0, "skip_prefill": False})
    return settings.model_copy(update={"kv": kv})


def group_disjoint_pairs(pairs: Collection[tuple[Backend, Backend]]) -> Iterator[list[tuple[Backend, Backend]]]:
    """Yield the pairs in groups in which each engine occurs once."""
    left = list(pairs)
    while left:
        some: list[tuple[Backend, Backend]] = []
        busy: set[Backend] = set()
        for pair in left:
            if busy.isdisjoint(pair) and len(some) < _PAIRS_AT_ONCE:
                some.append(pair)
                busy.update(pair)
        left = [pair for pair in left if pair not in some]
        yield some


def _split_into_chunks(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


# Queries engines for the data that the checks need.


class EngineAsker:
    """Queries engines. `idle_seconds`: idle time of a connection before the keep-alive check reuses it."""

    def __init__(
        self,
        names: HostNames,
        client: EngineClient,
        keys: EngineKeys,
        settings: Settings,
        idle_seconds: float,
    ) -> None:
        self._names = names
        self._client = client
        self._keys = keys
        self._settings = settings
        self._idle_seconds = idle_seconds

    async def examine(self, backend: Backend) -> Examined:
        """Query one engine for all that the checks need."""
        examined = Examined(backend=backend)
        try:
            addresses = await self._names.find_addresses(backend.host)
        except (AddressProblem, ValueError) as error:
            return replace(examined, name_problem=str(error) or "not a host name")
        connects = await asyncio.gather(*(self._connect(address, backend.port) for address in addresses))
        examined = replace(examined, addresses=addresses, connects=dict(zip(addresses, connects, strict=True)))
        if not examined.is_reached:
            return examined
        examined = await self._ask_health(examined)
        if isinstance(examined.health, str):
            return examined
        (version, models), exposition, keeps_alive = await asyncio.gather(
            self._ask_identity(backend), fetch_metrics(self._client, self._keys, backend), self._keeps_alive(backend)
        )
        info = _answer_or_none(await self._get(backend, SERVER_INFO_PATH, SERVER_INFO_TIMEOUT_SECONDS))
        facts = update_setup(make_engine_facts(version, _answer_or_none(models)), info)
        if facts.data_parallel_ranks is None and exposition is not None:
            facts = replace(facts, data_parallel_ranks=parse_rank_count(exposition))
        return replace(
            examined,
            version=_reported_version(version, info),
            models=_status_or_problem(models),
            facts=facts,
            keeps_alive=keeps_alive,
            started_at=None if exposition is None else parse_start_time(exposition),
            served_tokens=None if exposition is None else parse_completed_work(exposition),
            options=compared_options(None if info is None else info.parsed_json_or_none),
            has_metrics=exposition is not None,
            counts_prompts=exposition is not None and parse_prompt_tokens(exposition) is not None,
        )

    async def connect_problem(self, host: str, port: int) -> str:
        """Return why a connection fails; empty if it succeeds."""
        try:
            addresses = await self._names.find_addresses(host)
        except (AddressProblem, ValueError) as error:
            return str(error) or "not a host name"
        told = [await self._connect(address, port) for address in addresses]
        return "" if any(isinstance(seconds, float) for seconds in told) else str(told[0])

    async def _connect(self, address: str, port: int) -> float | str:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.timeouts.connect_seconds):
                _, writer = await asyncio.open_connection(address, port)
        except OSError as error:  # TimeoutError is one
            return describe_connect_error(error)
        writer.close()
        return time.monotonic() - began

    async def _ask_health(self, examined: Examined) -> Examined:
        told = await self._get(examined.backend, self._settings.health.path)
        if isinstance(told, str):
            return replace(examined, health=told)
        return replace(examined, health=told.status, ahead_seconds=_clock_offset_seconds(told))

    async def _ask_identity(self, backend: Backend) -> tuple[BufferedResponse | None, BufferedResponse | str]:
        version, models = await asyncio.gather(self._get(backend, VERSION_PATH), self._get(backend, MODELS_PATH))
        return _answer_or_none(version), models

    async def _keeps_alive(self, backend: Backend) -> bool | None:
        """Return whether a connection can be reused; None if unknown. Uses a separate client."""
        reused = asyncio.Event()

        async with EngineClient(self._names, on_reuse=reused.set, tls=self._client.engine_tls) as client:
            for pause_seconds in (0.0, self._idle_seconds):
                await asyncio.sleep(pause_seconds)
                if isinstance(await self._get(backend, self._settings.health.path, client=client), str):
                    return None
        return reused.is_set()

    async def _get(
        self,
        backend: Backend,
        path: str,
        timeout_seconds: float | None = None,
        client: EngineClient | None = None,
    ) -> BufferedResponse | str:
        """Return the response, or the reason why there is none."""
        seconds = timeout_seconds or self._settings.health.timeout_seconds
        try:
            headers = self._keys.credential_headers(backend)
            return await (client or self._client).get_body(backend.url, path, seconds, headers)
        except EngineRequestError as error:
            return str(error)


def bootstrap_address(examined: Examined, settings: Settings) -> tuple[str, int] | None:
    """Return host and port of a prefiller's bootstrap server; None if decoders use none."""
    backend, traits = examined.backend, settings.connector_traits
    if backend.role is not Role.PREFILL or not traits.meets_at_bootstrap:
        return None
    told = examined.facts.identity.engine_setup
    port = backend.bootstrap_port or (told and told.bootstrap_port) or settings.mooncake.bootstrap_port
    return backend.host, port


def _status_or_problem(models: BufferedResponse | str) -> int | str:
    """Return the status of /v1/models, or the problem. The problem of an engine that fails has its own words."""
    if isinstance(models, str) or models.status < 500:
        return models if isinstance(models, str) else models.status
    words = engine_error_text(models.body)
    return f"{MODELS_PATH} answered with status {models.status}" + (f": {words}" if words else "")


def _answer_or_none(told: BufferedResponse | str) -> BufferedResponse | None:
    return None if isinstance(told, str) else told


def _clock_offset_seconds(answer: BufferedResponse) -> float | None:
    """Return how many seconds the engine's clock is ahead; None without a valid `Date` header."""
    try:
        return parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()  # noqa: TID251 the time of day
    except (KeyError, ValueError, TypeError):
        return None


def _reported_version(version: BufferedResponse | None, info: BufferedResponse | None) -> str | None:
    """Return the version: vLLM reports it at /version, SGLang at /server_info."""
    for answer in (version, info):
        told = answer.parsed_json_or_none if answer is not None else None
        found = told.get("version") if isinstance(told, dict) else None
        if isinstance(found, str) and found.isascii() and found.isprintable():
            return found[:40]
    return None
