"""Loading the settings: what each source may say, which one wins, and the sentence for every mistake."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from proxy.settings import (
    OPTIONS,
    Endpoint,
    LoadedSettings,
    Settings,
    SettingsError,
    load_settings,
    parse_endpoints,
    write_yaml,
)
from proxy.settings.sources import find_misspelled_variables

ONE_PAIR = "--prefill p:1 --decode d:1"


def loaded(line: str = ONE_PAIR, **environ: str) -> LoadedSettings:
    return load_settings(shlex.split(line), environ)


def settings(line: str = ONE_PAIR, **environ: str) -> Settings:
    return loaded(line, **environ).settings


def mistake(line: str = ONE_PAIR, environ: Mapping[str, str] | None = None) -> str:
    """Return the sentence about a mistake."""
    with pytest.raises(SettingsError) as error:
        load_settings(shlex.split(line), environ or {})
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def texts(endpoints: tuple[Endpoint, ...]) -> list[str]:
    return [str(endpoint) for endpoint in endpoints]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


# The example proxy's command line


def test_every_flag_of_the_example_proxy_keeps_its_meaning() -> None:
    found = settings(
        "--port 1998 --host 0.0.0.0 --prefiller-hosts a b --prefiller-ports 1 2 --decoder-hosts c --decoder-ports 3"
        " --max-retries 4 --retry-delay 0.001 --max-waiting-retries 5 --waiting-retry-interval 7 --workers 2"
        " --log-level DEBUG"
    )
    assert (found.listen.host, found.listen.port) == ("0.0.0.0", 1998)
    assert texts(found.prefill) == ["a:1", "b:2"]
    assert texts(found.decode) == ["c:3"]
    assert (found.retry.max_attempts, found.retry.base_delay_seconds) == (4, 0.001)
    assert (found.joining.max_attempts, found.joining.interval_seconds) == (5, 7.0)
    assert (found.workers, found.log.level) == (2, "DEBUG")


def test_defaults_differ_from_the_example_proxy_only_where_they_are_safer() -> None:
    found = settings()
    assert (found.listen.host, found.listen.port) == ("127.0.0.1", 1999)
    assert (found.retry.max_attempts, found.retry.base_delay_seconds) == (3, 0.025)
    assert (found.joining.max_attempts, found.joining.interval_seconds) == (3, 10.0)
    assert found.workers == 1


def test_missing_hosts_and_ports_have_the_example_proxys_defaults() -> None:
    found = settings("--prefiller-hosts a --decoder-ports 9000")
    assert texts(found.prefill + found.decode) == ["a:8001", "localhost:9000"]


# As in the headers of vLLM-Ascend's hybrid_proxy_server.py, epd_load_balance_proxy_layerwise_server_example.py and
# disagg_epd_proxy.py, and in disagg_1e1pd_example.sh.
@pytest.mark.parametrize(
    ("line", "encode", "prefill", "decode", "connector"),
    [
        ("--server-hosts a b --server-ports 8100 8101", [], [], ["a:8100", "b:8101"], "plain"),
        (
            "--encoder-hosts e --encoder-ports 81 --pd-hosts a b --pd-ports 82 83",
            ["e:81"],
            [],
            ["a:82", "b:83"],
            "plain",
        ),
        (
            "--encode-servers-urls http://e:1,http://f:1 --prefill-servers-urls disable --decode-servers-urls http://d:8",
            *(["e:1", "f:1"], [], ["d:8"], "plain"),
        ),
        (
            "--encode-servers-urls e:1 --prefill-servers-urls http://p:3,http://p:4 --decode-servers-urls=http://d:5,d:6",
            *(["e:1"], ["p:3", "p:4"], ["d:5", "d:6"], "vllm_pull"),
        ),
    ],
)
def test_lines_of_the_other_examples_are_taken_as_they_are(
    line: str, encode: list[str], prefill: list[str], decode: list[str], connector: str
) -> None:
    found = settings(line)
    assert (texts(found.encode), texts(found.prefill), texts(found.decode)) == (encode, prefill, decode)
    assert found.connector == connector


def test_dynamic_buckets_of_the_hybrid_example_are_a_policy() -> None:
    line = "--server-hosts a b --server-ports 1 2 --server-group-threshold 1000 --max-request-tokens 9000"
    balance = settings(f"{line} --enable-dynamic-bucket").balance
    assert (balance.decode_policy, balance.long_prompt_tokens, balance.longest_prompt_tokens) == (
        *("length_groups", 1000, 9000),
    )
    assert settings(line).balance.decode_policy == "least_load"
    assert "long_prompt_tokens 1000 is not below" in mistake("--server-group-threshold 1000 --max-request-tokens 1000")


def test_another_connector_for_engines_that_do_both_stages_is_the_operators() -> None:
    assert loaded("--pd-hosts a --pd-ports 1").origins["connector"] == "--pd-hosts"
    assert "no prefiller given" in mistake("--pd-hosts a --pd-ports 1 --connector vllm_pull")


def test_items_are_never_encoded_as_one_request() -> None:
    line = "--encode e:1 --prefill p:1 --decode d:1 --encoder-dispatch-mode"
    (warning,) = loaded(f"{line} single").warnings
    assert warning.endswith("each media item is sent to one encoder, as with fanout")
    assert not loaded(f"{line} fanout").warnings


@pytest.mark.parametrize("option", ["port", "por"])
def test_flag_may_be_cut_short_as_argparse_has_it(option: str) -> None:
    line = f"--prefiller-{option} 13700 13701 --prefiller-h a b --decoder-{option}=13702 --decoder-host c --max-r 2"
    found = loaded(f"{line} --wor 3")
    assert texts(found.settings.prefill + found.settings.decode) == ["a:13700", "b:13701", "c:13702"]
    assert (found.settings.retry.max_attempts, found.settings.workers) == (2, 3)
    assert found.origins["workers"] == "--workers"


# From vLLM-Ascend's tutorials for one node with Mooncake, chunked pipeline parallelism, a KV pool and encoders apart.
@pytest.mark.parametrize(
    ("line", "prefill", "decode"),
    [
        (
            (
                "--host 192.0.0.1 --port 8080 --prefiller-hosts 192.0.0.1 --prefiller-port 13700"
                " --decoder-hosts 192.0.0.1 --decoder-ports 13701"
            ),
            ["192.0.0.1:13700"],
            ["192.0.0.1:13701"],
        ),
        (
            (
                "--host proxy_ip --port 8080 --prefiller-hosts 192.0.0.1 --prefiller-port 8003"
                " --decoder-hosts 192.0.0.3 192.0.0.3 192.0.0.4 --decoder-ports 8004 8005 8004"
            ),
            ["192.0.0.1:8003"],
            ["192.0.0.3:8004", "192.0.0.3:8005", "192.0.0.4:8004"],
        ),
        (
            (
                "--host localhost --prefiller-hosts localhost --prefiller-ports 8100 --decoder-hosts localhost"
                " --decoder-ports 8200"
            ),
            ["localhost:8100"],
            ["localhost:8200"],
        ),
        (
            (
                "--encoder-hosts 127.0.0.1 --encoder-ports 23001 --prefiller-hosts 127.0.0.1 --prefiller-ports 33003"
                " --decoder-hosts 127.0.0.1 --decoder-ports 33006 --host 127.0.0.1 --port 8001"
            ),
            ["127.0.0.1:33003"],
            ["127.0.0.1:33006"],
        ),
    ],
)
def test_lines_of_tutorials_mean_what_they_meant(line: str, prefill: list[str], decode: list[str]) -> None:
    found = loaded(line)
    assert (texts(found.settings.prefill), texts(found.settings.decode)) == (prefill, decode)
    assert found.warnings == ()


def test_flag_that_is_given_again_is_warned_about_and_the_last_one_counts() -> None:
    found = loaded(f"{ONE_PAIR} --port 1 --port=2 --por 3 --decode e:1 --prefiller-hosts a --prefiller-host b")
    assert found.settings.listen.port == 3
    assert texts(found.settings.prefill) == ["b:8001", "p:1"]
    assert found.warnings == (
        "--prefiller-hosts is given 2 times: the last value applies",
        "--port is given 3 times: the last value applies",
    )


def test_no_retries_still_means_one_attempt() -> None:
    found = settings(f"{ONE_PAIR} --max-retries 0 --max-waiting-retries 0")
    assert (found.retry.max_attempts, found.joining.max_attempts) == (1, 1)


def test_long_retry_delay_is_not_cut_by_the_default_cap() -> None:
    assert settings(f"{ONE_PAIR} --retry-delay 2").retry.max_delay_seconds == 2.0


def test_cap_below_the_delay_is_refused() -> None:
    sentence = mistake(environ={"PROXY_RETRY__MAX_DELAY_SECONDS": "0.01"})
    assert sentence == "retry: max_delay_seconds 0.01 is below base_delay_seconds 0.025"


# Endpoints


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("http://10.0.0.1:7100", ["10.0.0.1:7100"]),
        ("http://10.0.0.1:7100/", ["10.0.0.1:7100"]),
        ("HTTP://Node-1.example.org:7100", ["node-1.example.org:7100"]),
        ("localhost:7100", ["localhost:7100"]),
        ("141.xx.xx.1:7100", ["141.xx.xx.1:7100"]),
        ("[::1]:7100", ["[::1]:7100"]),
        ("http://[fd00:0::1]:7100", ["[fd00::1]:7100"]),
        ("10.0.0.3:7100-7102", ["10.0.0.3:7100", "10.0.0.3:7101", "10.0.0.3:7102"]),
        ("[::1]:7100-7101", ["[::1]:7100", "[::1]:7101"]),
    ],
)
def test_endpoint_is_written_as_host_and_port(text: str, endpoints: list[str]) -> None:
    assert texts(parse_endpoints(text)) == endpoints


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("10.0.0.1", "'10.0.0.1' has no port: write it as host:port"),
        ("[::1]", "'[::1]' has no port: write it as host:port"),
        ("http://a", "'http://a' has no port: write it as host:port"),
        ("a:", "'' is not a port or a port range like 7100-7115"),
        ("a:http", "'http' is not a port or a port range like 7100-7115"),
        ("a:0", "'0' is outside the ports 1 to 65535"),
        ("a:7100-70000", "'7100-70000' is outside the ports 1 to 65535"),
        ("a:7115-7100", "'7115-7100' is a port range that ends before it begins"),
        ("::1:7100", "'::1:7100' is ambiguous: write an IPv6 address in brackets, like [::1]:7100"),
        ("[::g]:7100", "'[::g]' is not a host name or an IP address"),
        ("[fe80::1%eth0]:7100", "'[fe80::1%eth0]' is not a host name or an IP address"),
        ("[a]:7100", "'[a]' is not a host name or an IP address"),
        (":7100", "'' is not a host name or an IP address"),
        ("a b:7100", "'a b' is not a host name or an IP address"),
        ("ftp://a:1", "'ftp://a:1' must begin with http:// or https://, or be host:port"),
        ("a:1/v1", "'a:1/v1' must be host:port without a path"),
        ("a:1?x", "'a:1?x' must be host:port without a path"),
        ("http://me:hush@a:1", "the address of 'a:1' must not hold a user name or password"),
    ],
)
def test_invalid_endpoint_is_refused_with_the_reason(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        parse_endpoints(text)


# Models


def models(endpoints: tuple[Endpoint, ...]) -> dict[str, tuple[str, ...]]:
    return {str(endpoint): endpoint.models for endpoint in endpoints}


def test_models_of_an_instance_follow_its_address(file: Path) -> None:
    line = "--prefill a:1 8998 model=x model=org/y --prefill b:2 model=z --decode c:3-4 model=x d:5"
    found = settings(line)
    assert models(found.prefill) == {"a:1": ("x", "org/y"), "b:2": ("z",)}
    assert ports(found.prefill) == {"a:1": 8998, "b:2": None}
    assert models(found.decode) == {"c:3": ("x",), "c:4": ("x",), "d:5": ()}
    file.write_text("prefill: ['a:1 8998 model=x model=org/y', b:2 model=z]\ndecode: ['c:3-4 model=x', 'd:5']\n")
    assert settings("", PROXY_CONFIG=str(file)) == found
    variables = {"PROXY_PREFILL": "a:1 8998 model=x model=org/y, b:2 model=z", "PROXY_DECODE": "c:3-4 model=x, d:5"}
    assert settings("", **variables) == found
    assert models(settings("--prefill a:1 model=x 8998 model=y --decode d:1").prefill) == {"a:1": ("x", "y")}


def test_models_of_instances_are_printed_as_written(file: Path) -> None:
    found = loaded("--prefill a:1 8998 model=x --decode d:1 model=y model=z")
    assert {"  - a:1 8998 model=x", "  - d:1 model=y model=z"} <= {*write_yaml(found).splitlines()}
    file.write_text(write_yaml(found))
    assert settings("", PROXY_CONFIG=str(file)) == found.settings


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--prefill a:1 model=", "--prefill: model= must be followed by the name of a model"),
        (
            f"--prefill a:1 model={'x' * 257}",
            "--prefill: the names of an instance's models must not have more than 256 characters",
        ),
        ("--prefill model=x", "--prefill: 'model=x' has no port: write it as host:port"),
    ],
)
def test_invalid_models_of_instances_are_refused(line: str, sentence: str) -> None:
    assert mistake(f"{line} --decode d:1") == sentence


# Bootstrap ports


def ports(endpoints: tuple[Endpoint, ...]) -> dict[str, int | None]:
    return {str(endpoint): endpoint.bootstrap_port for endpoint in endpoints}


def test_bootstrap_port_follows_its_prefiller_as_with_sglangs_router() -> None:
    line = "--prefill http://a:1 8998 --prefill b:2 none --prefill c:3 --prefill [::1]:4 65535 e:5 f:6-7 --decode d:1"
    assert ports(settings(line).prefill) == {
        "a:1": 8998,
        "b:2": None,
        "c:3": None,
        "[::1]:4": 65535,
        "e:5": None,
        "f:6": None,
        "f:7": None,
    }


def test_bootstrap_port_stands_beside_the_address_everywhere(file: Path) -> None:
    file.write_text("prefill:\n  - http://a:1 8998\n  - b:2\ndecode: [d:1]\n")
    assert ports(settings("", PROXY_CONFIG=str(file)).prefill) == {"a:1": 8998, "b:2": None}
    assert ports(settings("--decode d:1", PROXY_PREFILL="a:1 8998, b:2").prefill) == {"a:1": 8998, "b:2": None}


def test_bootstrap_port_is_printed_as_it_is_written(file: Path) -> None:
    found = loaded("--prefill [::1]:1 8998 --decode d:1")
    assert "  - '[::1]:1 8998'" in write_yaml(found).splitlines()
    file.write_text(write_yaml(found))
    assert settings("", PROXY_CONFIG=str(file)) == found.settings


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--prefill a:1 0", "--prefill: '0' is not a bootstrap port: it must be a number from 1 to 65535, or none"),
        (
            "--prefill a:1 99999",
            "--prefill: '99999' is not a bootstrap port: it must be a number from 1 to 65535, or none",
        ),
        (
            "--prefill a:1-2 8998",
            "--prefill: 'a:1-2 8998' has one bootstrap port for several engines: write each on its own",
        ),
        ("--prefill a:1 8998 8999", "--prefill: '1 8998' is not a port or a port range like 7100-7115"),
        ("--prefill 8998 a:1", "--prefill: '8998' has no port: write it as host:port"),
        ("--prefill a:1 8998 a:1 8999", "a:1 is given twice as a prefiller"),
    ],
)
def test_bootstrap_port_that_cannot_be_is_refused(line: str, sentence: str) -> None:
    assert mistake(f"{line} --decode d:1") == sentence


def test_decoder_has_no_bootstrap_port() -> None:
    assert mistake("--prefill p:1 --decode d:1 8998").startswith("--decode: '8998' has no port")
    assert mistake("--prefill p:1", {"PROXY_DECODE": "d:1 8998"}) == (
        "d:1 is a decoder: only prefillers have bootstrap ports"
    )


@given(st.text())
def test_no_text_leads_to_more_than_one_line(text: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings([], {"PROXY_DECODE": text})
    assert str(error.value).isprintable()


@given(st.sampled_from(["a", "10.0.0.1", "[::1]", "x_y.z"]), st.integers(1, 65530), st.integers(0, 5))
def test_endpoint_as_text_is_the_same_endpoint(host: str, port: int, more: int) -> None:
    endpoints = parse_endpoints(f"{host}:{port}-{port + more}")
    assert [again for endpoint in endpoints for again in parse_endpoints(str(endpoint))] == list(endpoints)
    assert [endpoint.port for endpoint in endpoints] == list(range(port, port + more + 1))


@pytest.mark.parametrize(
    ("hosts", "ports", "endpoints"),
    [
        ("a b", "1 2", ["a:1", "b:2"]),
        ("a", "1-3", ["a:1", "a:2", "a:3"]),
        ("a b", "1-2", ["a:1", "a:2", "b:1", "b:2"]),
        ("a b", "1-2 3-4", ["a:1", "a:2", "b:3", "b:4"]),
        ("a b", "1-2 9", ["a:1", "a:2", "b:9"]),
        ("a", "1-2 9", ["a:1", "a:2", "a:9"]),
        ("::1 [::2]", "7 8", ["[::1]:7", "[::2]:8"]),
    ],
)
def test_hosts_are_paired_with_ports_in_order(hosts: str, ports: str, endpoints: list[str]) -> None:
    assert texts(settings(f"--prefill p:1 --decoder-hosts {hosts} --decoder-ports {ports}").decode) == endpoints


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--prefiller-hosts a b c --prefiller-ports 1 2", "3 prefiller hosts but 2 prefiller ports"),
        ("--decoder-hosts a --decoder-ports 1 2", "1 decoder host but 2 decoder ports"),
        ("--decoder-hosts a b --decoder-ports 1", "2 decoder hosts but 1 decoder port"),
        ("--decoder-hosts a b --decoder-ports 1-2 3-4 5-6", "2 decoder hosts but 3 decoder ports"),
        ("--decoder-ports 7100,7101", "--decoder-ports: '7100,7101' is not a port or a port range like 7100-7115"),
        ("--decoder-hosts a/b", "--decoder-hosts: 'a/b' is not a host name or an IP address"),
        ("--decode x", "--decode: 'x' has no port: write it as host:port"),
        (
            "--prefiller-hosts http://127.0.0.1",
            "--prefiller-hosts: 'http://127.0.0.1' is not a host name: use --prefill for URLs and host:port",
        ),
        (
            "--decoder-hosts a 127.0.0.1:7100",
            "--decoder-hosts: '127.0.0.1:7100' is not a host name: use --decode for URLs and host:port",
        ),
        (
            "--encoder-hosts [::1]:7100",
            "--encoder-hosts: '[::1]:7100' is not a host name: use --encode for URLs and host:port",
        ),
        (
            "--decoder-hosts http://me:hush@a:1",
            "--decoder-hosts: 'a:1' is not a host name: use --decode for URLs and host:port",
        ),
    ],
)
def test_hosts_and_ports_that_do_not_fit_are_refused(line: str, sentence: str) -> None:
    assert mistake(line) == sentence


def test_both_spellings_add_up() -> None:
    found = loaded("--decode c:3 d:4 --decoder-hosts a b --decoder-ports 1 2 --prefill p:1 --prefill q:1-2")
    assert texts(found.settings.decode) == ["a:1", "b:2", "c:3", "d:4"]
    assert texts(found.settings.prefill) == ["p:1", "q:1", "q:2"]
    assert found.origins["decode"] == "--decoder-hosts, --decoder-ports, --decode"


@pytest.mark.parametrize(
    "line", ["--encode http://e:1 e:2-3", "--encoder-hosts e --encoder-ports 1-3", "--encode e:1 --encode e:2 e:3"]
)
def test_encoders_are_given_like_prefillers_and_decoders(line: str) -> None:
    assert texts(settings(f"{ONE_PAIR} {line}").encode) == ["e:1", "e:2", "e:3"]
    assert settings(ONE_PAIR).encode == ()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--prefill a:1 --decode b:1-2 b:2", "b:2 is given twice as a decoder"),
        ("--prefill a:1 --decode 127.0.0.1:1 localhost:1", "localhost:1 is given twice as a decoder"),
        (
            "--prefill [::ffff:127.0.0.1]:1 --decode LocalHost:1",
            "localhost:1 is given both as a prefiller and as a decoder",
        ),
        ("--prefill a:1 --decode A:1", "a:1 is given both as a prefiller and as a decoder"),
        ("--prefill a:1 --decode b:1 --encode b:1", "b:1 is given both as a decoder and as an encoder"),
        ("--prefill a:1 --decode b:1 --encode c:1-2 c:2", "c:2 is given twice as an encoder"),
        (
            "--prefill a:1 --decode b:1 --encode c:1 --connector sglang_bootstrap",
            "connector sglang_bootstrap has no encoders: SGLang's encoders work in another way",
        ),
        ("--prefill [::1]:1 --decode [0:0::1]:1", "[::1]:1 is given both as a prefiller and as a decoder"),
        ("--prefill a:1 --decode b:1-2000", "2001 instances are given, but 1024 is the limit"),
        (
            "",
            (
                "no prefiller and no decoder given: use --prefill and --decode, PROXY_PREFILL and PROXY_DECODE"
                " or a --config file"
            ),
        ),
        ("--decode a:1", "no prefiller given: use --prefill, PROXY_PREFILL or a --config file"),
        ("--connector plain", "no decoder given: use --decode, PROXY_DECODE or a --config file"),
        (
            "--connector plain --prefill a:1 --decode b:1",
            "connector plain has no prefillers: give every engine as a decoder",
        ),
    ],
)
def test_set_of_backends_that_cannot_work_is_refused(line: str, sentence: str) -> None:
    assert mistake(line) == sentence


@pytest.mark.parametrize(
    ("line", "warnings"),
    [
        ("--connector vllm_pull", ()),
        ("--connector auto", ()),
        (
            "--connector sglang_bootstrap",
            ("kv.skip_prefill has no effect with connector sglang_bootstrap: prefillers compute all prompts",),
        ),
        (
            "--connector vllm_store --prefill-policy round_robin",
            ("kv.skip_prefill has no effect with prefill policy round_robin: it needs least_load",),
        ),
    ],
)
def test_option_without_effect_gives_a_warning(line: str, warnings: tuple[str, ...]) -> None:
    assert loaded(f"{ONE_PAIR} {line}", PROXY_KV__SKIP_PREFILL="true").warnings == warnings
    assert loaded(f"{ONE_PAIR} {line}").warnings == ()


def test_connector_plain_needs_only_decoders() -> None:
    assert texts(settings("--connector plain --decode a:1-2").decode) == ["a:1", "a:2"]


# Precedence and origins


def test_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(file: Path) -> None:
    file.write_text("listen: {port: 1, backlog: 1}\nworkers: 1\nlog: {level: ERROR}\n")
    environ = {"PROXY_CONFIG": str(file), "PROXY_LISTEN__PORT": "2", "PROXY_WORKERS": "2"}
    found = loaded(f"{ONE_PAIR} --port 3", **environ)
    assert found.settings.listen.port == 3
    assert found.settings.workers == 2
    assert found.settings.log.level == "ERROR"
    assert found.settings.listen.keepalive_seconds == 75.0
    assert found.origins["listen.port"] == "--port"
    assert found.origins["workers"] == "PROXY_WORKERS"
    assert found.origins["log.level"] == str(file)
    assert found.origins["listen.keepalive_seconds"] == "default"
    assert set(found.origins) == set(OPTIONS)


def test_config_flag_beats_its_variable(file: Path) -> None:
    file.write_text("workers: 3\n")
    assert settings(f"{ONE_PAIR} --config {file}", PROXY_CONFIG="/nowhere.yaml").workers == 3


def test_list_is_replaced_as_a_whole(file: Path) -> None:
    file.write_text("prefill: ['x:1', 'y:1']\ndecode: [z:1]\n")
    found = settings("--prefill p:1", PROXY_CONFIG=str(file))
    assert texts(found.prefill + found.decode) == ["p:1", "z:1"]


def test_lists_in_the_environment_are_separated_by_commas() -> None:
    found = settings("", PROXY_PREFILL="a:1, [::1]:2", PROXY_DECODE="b:1-2,", PROXY_PASSTHROUGH="tokenizer")
    assert texts(found.prefill) == ["a:1", "[::1]:2"]
    assert texts(found.decode) == ["b:1", "b:2"]
    assert found.passthrough == ("tokenizer",)


def test_policy_flag_sets_both_roles_and_the_flag_of_a_role_wins() -> None:
    found = loaded(f"{ONE_PAIR} --decode-policy random --policy round_robin")
    assert found.settings.balance.prefill_policy == "round_robin"
    assert found.settings.balance.decode_policy == "random"
    assert found.origins["balance.prefill_policy"] == "--policy"
    assert found.origins["balance.decode_policy"] == "--decode-policy"


def test_workers_auto_is_a_number_of_cores() -> None:
    assert settings(f"{ONE_PAIR} --workers auto").workers >= 1


def test_empty_variable_is_as_good_as_none() -> None:
    assert settings(PROXY_LISTEN__PORT="", PROXY_CONFIG=" ").listen.port == 1999


# Those of services named proxy, proxy-listen and proxy-log-level, and what others call theirs.
@pytest.mark.parametrize("service", ["PROXY", "PROXY_LISTEN", "PROXY_LOG_LEVEL"])
def test_variables_of_others_do_no_harm_and_are_no_mistakes(service: str) -> None:
    of_kubernetes = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "1999",
        f"{service}_SERVICE_PORT_HTTP": "1999",
        f"{service}_PORT": "tcp://10.0.0.1:1999",
        f"{service}_PORT_1999_TCP": "tcp://10.0.0.1:1999",
        f"{service}_PORT_1999_TCP_PROTO": "tcp",
        f"{service}_PORT_1999_TCP_PORT": "1999",
        f"{service}_PORT_1999_TCP_ADDR": "10.0.0.1",
    }
    of_others = {"PROXY_HOST": "proxy.example.org", "PROXY_URL": "http://x", "PROXY_USER": "me", "NO_PROXY": "*"}
    found = loaded(**of_kubernetes, **of_others)
    assert found.settings.listen.port == 1999
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PROXY_LISTEN_PORT", "PROXY_LISTEN__PORT"),
        ("PROXY_LOG_LEVEL", "PROXY_LOG__LEVEL"),
        ("PROXY_AUTH_ENGINE_API_KEY", "PROXY_AUTH__ENGINE_API_KEY"),
        ("PROXY_LISEN__PORT", "PROXY_LISTEN__PORT"),
        ("PROXY_LISTEN_PROT", "PROXY_LISTEN__PORT"),
        ("PROXY_WORKER", "PROXY_WORKERS"),
        ("PROXY__WORKERS", "PROXY_WORKERS"),
        ("PROXY_WROKERS", "PROXY_WORKERS"),
        ("PROXY_CONECTOR", "PROXY_CONNECTOR"),
        ("PROXY_PREFILLER", "PROXY_PREFILL"),
        ("PROXY_DECODERS", "PROXY_DECODE"),
        ("PROXY_DECODR", "PROXY_DECODE"),
        ("PROXY_CONFG", "PROXY_CONFIG"),
        ("proxy_listen__port", "PROXY_LISTEN__PORT"),
        ("PROXY_workers", "PROXY_WORKERS"),
    ],
)
def test_variable_that_is_almost_an_option_is_warned_about(name: str, meant: str) -> None:
    assert loaded(**{name: "sk-canary"}).warnings == (f"{name} is no option and is ignored: did you mean {meant}?",)
    assert loaded(**{name: " "}).warnings == ()


def test_mistake_is_reported_with_ignored_options_that_may_cause_it() -> None:
    assert mistake("--decode d:1 --port 1 --port 2", {"PROXY_CONECTOR": "plain"}) == (
        "no prefiller given: use --prefill, PROXY_PREFILL or a --config file;"
        " --port is given 2 times: the last value applies;"
        " PROXY_CONECTOR is no option and is ignored: did you mean PROXY_CONNECTOR?"
    )


@pytest.mark.parametrize("option", OPTIONS)
def test_one_typo_in_a_variable_is_noticed_whichever_it_is(option: str) -> None:
    name = "PROXY_" + option.upper().replace(".", "_")
    for place in range(len("PROXY_"), len(name)):
        left, right = name[:place], name[place + 1 :]
        for misspelt in {left + right, f"{left}X{right}", f"{left}X{name[place:]}"} - {"PROXY_ENCODE", "PROXY_DECODE"}:
            warnings = list(find_misspelled_variables({misspelt: "x"}))
            assert len(warnings) == 1, misspelt


# Mistakes


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("PROXY_LISTEN__PROT", "2", "PROXY_LISTEN__PROT names no option (did you mean PROXY_LISTEN__PORT?)"),
        ("PROXY_LISTEN__FIRST\nsecond line", "2", r"'PROXY_LISTEN__FIRST\nsecond line' names no option"),
        ("PROXY_RETRY", "2", "PROXY_RETRY is a section: set its options, such as PROXY_RETRY__MAX_ATTEMPTS"),
        ("PROXY_WORKERS", "many", "PROXY_WORKERS must be a valid integer, not 'many'"),
        ("PROXY_WORKERS", "0", "PROXY_WORKERS must be greater than or equal to 1, not '0'"),
        ("PROXY_DECODE", "a", "PROXY_DECODE: 'a' has no port: write it as host:port"),
        (
            *("PROXY_LISTEN__CORS_ORIGINS", "https://a.example/"),
            (
                "PROXY_LISTEN__CORS_ORIGINS must be a list of origins like https://chat.example.com, without a path,"
                " or *, not 'https://a.example/'"
            ),
        ),
        *(
            (
                *("PROXY_SGLANG__CHAT_SAMPLING", value),
                (
                    "PROXY_SGLANG__CHAT_SAMPLING must be a list of name=number, such as temperature=0.6, of"
                    f" temperature, top_p, top_k, min_p, not {value!r}"
                ),
            )
            for value in ("temperature", "temperature=hot", "temperature=-1", "top_k=0.5", "repetition_penalty=1.1")
        ),
        ("PROXY_TIMEOUTS__IDLE_SECONDS", "inf", "PROXY_TIMEOUTS__IDLE_SECONDS must be a finite number, not 'inf'"),
        ("PROXY_TIMEOUTS__IDLE_SECONDS", "5s", "PROXY_TIMEOUTS__IDLE_SECONDS must be a valid number, not '5s'"),
        ("PROXY_KV__SKIP_PREFILL", "maybe", "PROXY_KV__SKIP_PREFILL must be auto, true or false, not 'maybe'"),
    ],
)
def test_mistake_in_the_environment_names_the_variable(name: str, value: str, sentence: str) -> None:
    assert mistake("--prefill p:1" if name == "PROXY_DECODE" else ONE_PAIR, {name: value}) == sentence


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "--prefill-servers-urls disable --prefill a:1 --decode b:1",
            "--prefill disable means no prefillers and excludes other values",
        ),
        ("--prot 1", "unknown flag --prot (did you mean --port?)"),
        ("--frobnicate", "unknown flag --frobnicate"),
        (
            "--api-key=hush",
            (
                "unknown flag --api-key: set the keys of clients in auth.client_keys_file, and the key of engines in"
                " OPENAI_API_KEY"
            ),
        ),
        ("--prefiller a", "--prefiller is ambiguous: use --prefiller-hosts or --prefiller-ports"),
        ("--log=hush", "--log is ambiguous: use --log-level or --log-format"),
        (
            "--admin-key hush",
            "unknown flag --admin-key: set auth.admin_key in the --config file, or PROXY_AUTH__ADMIN_KEY",
        ),
        (
            "--stall-seconds=1",
            (
                "unknown flag --stall-seconds: set health.stall_seconds in the --config file, or"
                " PROXY_HEALTH__STALL_SECONDS"
            ),
        ),
        (
            "--networks 10.0.0.0/8",
            "unknown flag --networks: set admin.networks in the --config file, or PROXY_ADMIN__NETWORKS",
        ),
        (
            "--max-attempts 3",
            (
                "unknown flag --max-attempts: set retry.max_attempts, resume.max_attempts or joining.max_attempts in"
                " the --config file"
            ),
        ),
        ("frobnicate", "unexpected argument 'frobnicate'"),
        ("--port 1 doctor", "a sub-command comes first: write `pdproxy doctor [flags]`"),
        ("--json doctor", "a sub-command comes first: write `pdproxy doctor [flags]`"),
        ("--prefill a:1 --decode b:1 top", "a sub-command comes first: write `pdproxy top [flags]`"),
        ("--prefiller-hosts a --decoder-hosts b doctor", "a sub-command comes first: write `pdproxy doctor [flags]`"),
        ("--retry-max-backoff-ms 5s", "--retry-max-backoff-ms must be a number of milliseconds, not 5s"),
        ("--kv-connector moriio", "--kv-connector must be nixl or mooncake, not moriio"),
        ("--queue-size many", "--queue-size must be a valid integer, not 'many'"),
        (
            "--cors-allowed-origins a",
            (
                "--cors-allowed-origins must be a list of origins like https://chat.example.com, without a path, or *,"
                " not ['a']"
            ),
        ),
        ("--port", "--port: expected one argument"),
        ("--decode", "--decode: expected at least one argument"),
        ("--port 80a", "--port must be a valid integer, not '80a'"),
        ("--port -1", "--port must be greater than or equal to 0, not '-1'"),
        ("--port 65536", "--port must be less than or equal to 65535, not '65536'"),
        ("--host a/b", "--host: 'a/b' is not a host name or an IP address"),
        (
            "--connector pigeon",
            (
                "--connector must be 'auto', 'vllm_pull', 'vllm_store', 'nixl_push', 'mooncake_bootstrap',"
                " 'sglang_bootstrap', 'ascend_layerwise' or 'plain', not 'pigeon'"
            ),
        ),
        (
            "--connector mooncake",
            (
                "--connector must be mooncake_bootstrap for vLLM's MooncakeConnector, vllm_pull for vLLM-Ascend's"
                " MooncakeConnectorV1, vllm_store for MooncakeStoreConnector, or sglang_bootstrap for SGLang, not"
                " 'mooncake'"
            ),
        ),
        (
            "--policy cache_aware",
            (
                "--policy must be least_load, which prefers instances with cached prefixes and keeps sessions together,"
                " not 'cache_aware'"
            ),
        ),
        (
            "--policy best",
            (
                "--policy must be 'least_load', 'least_tokens', 'round_robin', 'power_of_two', 'random' or"
                " 'length_groups', not 'best'"
            ),
        ),
        ("--max-retries 1.5", "--max-retries must be a valid integer, not '1.5'"),
        ("--config /nowhere.yaml", "/nowhere.yaml cannot be read: no such file or directory"),
    ],
)
def test_mistake_on_the_command_line_names_the_flag(line: str, sentence: str) -> None:
    assert mistake(line) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("listen: {prot: 1}", ": unknown option listen.prot (did you mean listen.port?)"),
        ("wrokers: 1", ": unknown option wrokers (did you mean workers?)"),
        ("max_waiting: 1", ": unknown option max_waiting (did you mean admission.max_waiting?)"),
        ("listen: {probe_port: 1}", ": unknown option listen.probe_port (did you mean admin.probe_port?)"),
        ("port: 80", ": unknown option port (did you mean listen.port, admin.port or layerwise.port?)"),
        ("listen: 5", ": listen is a section: write its options indented below it"),
        ("auth: hush", ": auth is a section: write its options indented below it"),
        ("workers: many", ": workers must be a valid integer, not 'many'"),
        ("workers: yes", ": workers must be a number, not true"),
        ("workers: 1.5", ": workers must be a valid integer, not 1.5"),
        ("workers:", ": workers must be a valid integer, not null"),
        ("timeouts: {idle_seconds: 0}", ": timeouts.idle_seconds must be greater than 0, not 0"),
        ("decode: 5", ": decode must be a list, not 5"),
        ("decode: [5]", ": decode must be a list of host:port, not [5]"),
        ("decode: [a]", ": decode: 'a' has no port: write it as host:port"),
        ("health: {path: up}", ": health.path must be a path that begins with /, not 'up'"),
        ("passthrough: [files]", ": passthrough must be 'tokenizer' or 'pooling', not 'files'"),
        ("auth: {engine_api_key: 12345}", ": auth.engine_api_key must be a valid string"),
        ('auth: {admin_key: "hu\\nsh"}', ": auth.admin_key must be printable ASCII, as it is sent in an HTTP header"),
        ("workers: 1\nworkers: 2", ", line 2: workers is given twice"),
        ("a: [", ", line 1: expected the node content, but found '<stream end>'"),
        ("- a", " must hold options such as `workers: 2`, not a list"),
    ],
)
def test_mistake_in_the_file_names_file_and_option(file: Path, text: str, sentence: str) -> None:
    file.write_text(text)
    flags = "--prefill p:1" if text.startswith("decode") else ONE_PAIR
    assert mistake(f"{flags} --config {file}") == f"{file}{sentence}"


def test_file_of_comments_says_nothing(file: Path) -> None:
    file.write_text("# nothing\nlisten:\n  # port: 1\n")
    assert settings(f"{ONE_PAIR} --config {file}").listen.port == 1999


def test_file_that_is_not_text_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    assert mistake(f"--config {file}") == f"{file} is not UTF-8 text"


def test_long_value_is_cut_in_the_sentence() -> None:
    assert len(mistake(f"{ONE_PAIR} --port {'x' * 10_000}")) < 200


# Secrets


def engine_key(found: Settings) -> str | None:
    key = found.auth.engine_api_key
    return None if key is None else key.get_secret_value()


def test_engines_key_is_openai_api_key_unless_something_else_is_said(file: Path) -> None:
    file.write_text("auth: {engine_api_key: from-file}")
    assert engine_key(settings()) is None
    found = loaded(OPENAI_API_KEY=" hush\n")
    assert engine_key(found.settings) == "hush"
    assert found.origins["auth.engine_api_key"] == "OPENAI_API_KEY"
    assert engine_key(settings(OPENAI_API_KEY="hush", PROXY_AUTH__ENGINE_API_KEY="louder")) == "louder"
    assert engine_key(settings(OPENAI_API_KEY="hush", PROXY_CONFIG=str(file))) == "from-file"


def test_empty_key_is_no_key(file: Path) -> None:
    file.write_text("auth: {engine_api_key: ''}")
    assert engine_key(settings(OPENAI_API_KEY="")) is None
    assert engine_key(settings(OPENAI_API_KEY="hush", PROXY_CONFIG=str(file))) is None


def test_key_left_out_in_the_file_does_not_hide_openai_api_key(file: Path) -> None:
    file.write_text("auth: {engine_api_key: null}")
    assert engine_key(settings(OPENAI_API_KEY="hush", PROXY_CONFIG=str(file))) == "hush"


def test_keys_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hush\n")
    found = loaded(PROXY_AUTH__ADMIN_KEY_FILE=str(tmp_path / "key"), OPENAI_API_KEY="other")
    assert found.settings.auth.admin_key is not None
    assert found.settings.auth.admin_key.get_secret_value() == "hush"
    assert found.origins["auth.admin_key"] == str(tmp_path / "key")
    assert engine_key(settings(PROXY_AUTH__ENGINE_API_KEY_FILE=str(tmp_path / "key"), OPENAI_API_KEY="other")) == "hush"


@pytest.mark.parametrize("given_as", ["etc/gateway.yaml", "../work/etc/gateway.yaml", "/absolute"])
def test_relative_path_in_a_file_begins_where_that_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_as: str
) -> None:
    for directory, key in (("work", "wrong"), ("work/etc", "right")):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "key").write_text(key)
        (tmp_path / directory / "keys.yaml").write_text(f"keys: [{{name: {key}, key: sk-1}}]")
    monkeypatch.chdir(tmp_path / "work")
    file = tmp_path / "work/etc/gateway.yaml"
    file.write_text("auth: {engine_api_key_file: key, admin_key_file: ../etc/key, client_keys_file: ./keys.yaml}")
    found = loaded(f"{ONE_PAIR} --config {file if given_as == '/absolute' else given_as}")
    assert engine_key(found.settings) == "right"
    assert found.settings.auth.admin_key is not None
    assert found.settings.auth.admin_key.get_secret_value() == "right"
    assert [key.name for key in found.client_keys] == ["right"]
    text = write_yaml(found)
    (tmp_path / "other.yaml").write_text("\n".join(line for line in text.splitlines() if "_key: '*" not in line))
    assert settings(f"--config {tmp_path / 'other.yaml'}") == found.settings


def test_relative_path_in_the_environment_begins_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "key").write_text("right")
    monkeypatch.chdir(tmp_path / "here")
    file.write_text("auth: {engine_api_key_file: other}")
    environ = {"PROXY_CONFIG": "../gateway.yaml", "PROXY_AUTH__ENGINE_API_KEY_FILE": "key"}
    assert engine_key(settings(**environ)) == "right"


def test_unreadable_file_is_reported_with_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.chdir("/")
    file.write_text("auth: {client_keys_file: keys.yaml}")
    assert mistake(f"{ONE_PAIR} --config {file}") == f"{tmp_path}/keys.yaml cannot be read: no such file or directory"
    file.write_text("auth: {admin_key_file: key}")
    sentence = f"auth.admin_key_file {tmp_path}/key cannot be read: no such file or directory"
    assert mistake(f"{ONE_PAIR} --config {file}") == sentence
    assert mistake("--config nowhere.yaml") == "/nowhere.yaml cannot be read: no such file or directory"


def test_empty_or_null_path_becomes_none(file: Path) -> None:
    file.write_text("auth: {client_keys_file: ' ', admin_key_file: null}")
    assert settings(f"{ONE_PAIR} --config {file}").auth.client_keys_file is None


def test_key_file_that_holds_no_key_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "key"
    empty.write_text("\n")
    assert mistake(environ={"PROXY_AUTH__ADMIN_KEY_FILE": str(empty)}) == f"auth.admin_key_file {empty} is empty"
    assert "auth.admin_key_file /nowhere cannot be read" in mistake(environ={"PROXY_AUTH__ADMIN_KEY_FILE": "/nowhere"})
    both = {"PROXY_AUTH__ADMIN_KEY_FILE": str(empty), "PROXY_AUTH__ADMIN_KEY": "hush"}
    assert mistake(environ=both) == "auth.admin_key and auth.admin_key_file are both given: give only one of them"


def test_key_never_appears_in_a_sentence_or_a_representation(file: Path) -> None:
    assert "hush" not in mistake(environ={"OPENAI_API_KEY": "hush\nhush"})
    assert "hush" not in mistake(environ={"PROXY_AUTH__ADMIN_KEY": "hush\x00"})
    file.write_text("auth: {admin_key: [hush]}")
    assert "hush" not in mistake(f"{ONE_PAIR} --config {file}")
    found = loaded(OPENAI_API_KEY="hush", PROXY_AUTH__ADMIN_KEY="hush")
    assert "hush" not in repr(found) + str(found.settings) + write_yaml(found)


# The model and its picture


def test_every_option_is_documented() -> None:
    assert [option for option, field in OPTIONS.items() if not field.description] == []


def test_settings_can_be_made_in_code() -> None:
    made = Settings(prefill=(Endpoint(host="a", port=1),), decode=(Endpoint(host="b", port=2),))
    assert texts(made.prefill + made.decode) == ["a:1", "b:2"]


def test_printed_settings_name_every_origin_and_load_as_the_same_settings(file: Path) -> None:
    environ = {"PROXY_KV__ON_MISSING": "local", "PROXY_LISTEN__HOST": "::"}
    found = loaded("--prefill [::1]:1-2 --decode d:1 --port 5", **environ)
    text = write_yaml(found)
    lines = text.splitlines()
    assert "  port: 5  # --port" in lines
    assert "  on_missing: local  # PROXY_KV__ON_MISSING" in lines
    assert "prefill:  # --prefill" in lines
    assert "workers: 1  # default" in lines
    assert sum("  # " in line for line in lines) == len(OPTIONS)
    file.write_text(text)
    assert settings("", PROXY_CONFIG=str(file)) == found.settings


def test_printed_keys_are_masked() -> None:
    text = write_yaml(loaded(OPENAI_API_KEY="hush"))
    assert "  engine_api_key: '**********'  # OPENAI_API_KEY" in text.splitlines()
    assert yaml.safe_load(text)["auth"]["admin_key"] is None


# Elastic instances


def test_elastic_instances_start_where_they_are_listed_or_where_there_are_fewer() -> None:
    found = settings("--decode d:1 d:2 --elastic e:1 8998 d:2 --elastic e:2-3")
    assert texts(found.elastic.instances) == ["e:1", "d:2", "e:2", "e:3"]
    assert texts(found.instances_of("prefill")) == ["e:1", "e:2", "e:3"]
    assert texts(found.instances_of("decode")) == ["d:1", "d:2"]
    assert found.instances_of("prefill")[0].bootstrap_port == 8998
    assert found.fleet == "3 prefillers, 2 decoders, 4 of them elastic"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--elastic e:1", "no decoder given: use --decode, PROXY_DECODE or a --config file"),
        ("--elastic e:1 e:1", "e:1 is given twice as an elastic instance"),
        ("--elastic e:1 e:2 --encode e:1", "e:1 is given both as an encoder and as an elastic instance"),
        (
            "--elastic e:1 e:2 --connector layerwise",
            (
                "connector ascend_layerwise cannot exchange the roles of instances: give e:1 as a prefiller or as a "
                "decoder, and not as elastic"
            ),
        ),
    ],
)
def test_impossible_elastic_instances_are_rejected(line: str, sentence: str) -> None:
    assert mistake(line) == sentence
