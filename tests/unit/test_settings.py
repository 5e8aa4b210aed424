"""Settings: precedence, validation in one clear line, and the way from a supervisor to its children."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import main
from cli.readme import markdown_table
from common import settings as table
from common.settings import DEFAULT_REDIS_URL, ROLES, TABLE, Command, Settings, SettingsError
from tests.helpers.source import ROOT, modules

DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))


def test_a_flag_wins_over_a_variable_and_that_over_the_default() -> None:
    environ = {"MILLSTREAM_PORT": "9000", "MILLSTREAM_PARTITIONS": "4"}
    chosen = table.resolve(Command.SERVE, {"port": "9001"}, environ)
    assert (chosen.port, chosen.partitions, chosen.dtype) == (9001, 4, "bfloat16")


def test_an_empty_variable_is_unset() -> None:
    assert table.resolve(Command.SERVE, {}, {"MILLSTREAM_PORT": ""}).port == 8000


def test_a_command_ignores_variables_it_does_not_take() -> None:
    chosen = table.resolve(Command.TOKENIZER, {}, {"MILLSTREAM_PORT": "not a number"})
    assert chosen.port == 8000


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("port", "65536", "--port must be a whole number from 0 to 65535, not '65536'"),
        ("port", "8e3", "--port must be a whole number"),
        ("dtype", "float16", "--dtype must be one of bfloat16, float32, not 'float16'"),
        ("queue_timeout", "nan", "--queue-timeout must be a number from 0.1"),
        ("request_timeout", "inf", "--request-timeout must be a number"),
        ("max_body_bytes", "8 apples", "--max-body-bytes must be at least 1kb"),
        ("redis_maxmemory", "1mb", "--redis-maxmemory must be at least 16mb"),
        ("key_prefix", "a:b", "--key-prefix must match"),
        ("model", "", "--model must be text"),
        ("auth", "yes", "--auth must be one of auto, required, off, not 'yes'"),
        ("api_keys", "a b", "--api-key must be keys of printable characters without spaces"),
        ("api_keys", "", "--api-key must be keys"),
        ("allowed_origins", "example.com", "--allowed-origins must be `*` or origins"),
        ("allowed_origins", "https://a/path", "--allowed-origins must be `*` or origins"),
        ("disable_access_log_for_endpoints", "health", "--disable-access-log-for-endpoints must be paths"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(name: str, raw: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        table.resolve(Command.SERVE, {name: raw}, {})
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_a_secret_that_is_refused_is_not_shown() -> None:
    with pytest.raises(SettingsError) as caught:
        table.resolve(Command.API, {}, {"MILLSTREAM_API_KEYS": "good-key,bad key"})
    assert "MILLSTREAM_API_KEYS must be keys" in str(caught.value)
    assert "good-key" not in str(caught.value)


def test_a_bad_variable_is_called_by_its_name() -> None:
    with pytest.raises(
        SettingsError, match=r"MILLSTREAM_PORT must be a whole number.*'tcp://10\.0\.0\.1:80'"
    ):
        table.resolve(Command.API, {}, {"MILLSTREAM_PORT": "tcp://10.0.0.1:80"})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"max_num_batched_tokens": "16"}, r"--max-num-batched-tokens \(16\) must be at least"),
        ({"auth": "off", "api_keys": "k"}, "--auth off and API keys contradict each other"),
        ({"auth": "off", "api_key_file": "f"}, "--auth off and API keys contradict each other"),
        ({"ssl_certfile": "c"}, "--ssl-certfile and --ssl-keyfile need each other"),
        ({"ssl_keyfile": "k"}, "--ssl-certfile and --ssl-keyfile need each other"),
        ({"allowed_origins": "*,https://a"}, r"--allowed-origins \* already allows every origin"),
    ],
)
def test_settings_that_cannot_go_together_are_refused(flags: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        table.resolve(Command.SERVE, flags, {})


def test_a_list_comes_from_one_flag_or_several_or_a_variable() -> None:
    parser = main.build_parser()
    for words in (["--api-key", "a", "--api-key", "b"], ["--api-key", "a,b"], ["--api-key", " a , b,"]):
        flags = vars(parser.parse_args(["api", *words]))
        assert table.resolve(Command.API, flags, {"MILLSTREAM_API_KEYS": "c"}).api_keys == ("a", "b")
    assert table.resolve(Command.API, {}, {"MILLSTREAM_API_KEYS": "c, d"}).api_keys == ("c", "d")
    without = table.resolve(Command.API, {"disable_access_log_for_endpoints": ","}, {})
    assert without.disable_access_log_for_endpoints == ()


@pytest.mark.parametrize(
    ("raw", "value"), [("65536", 65536), ("64kb", 65536), ("8MB", 8 << 20), ("1gb", 1 << 30)]
)
def test_sizes_take_units(raw: str, value: int) -> None:
    assert table.resolve(Command.API, {"max_body_bytes": raw}, {}).max_body_bytes == value


def test_defaults_that_depend_on_others() -> None:
    assert table.resolve(Command.SERVE, {}, {}).max_num_seqs == 32
    assert table.resolve(Command.SERVE, {"engine": "null"}, {}).max_num_seqs == 256
    assert table.resolve(Command.SERVE, {"engine": "null", "max_num_seqs": "32"}, {}).max_num_seqs == 32
    assert table.resolve(Command.SERVE, {}, {}).redis_url == ""
    assert table.resolve(Command.API, {}, {}).redis_url == DEFAULT_REDIS_URL


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("/models/Tiny.Q4_0.gguf", "Tiny.Q4_0"),
        ("owner/model", "owner/model"),
        (str(ROOT / "tests"), "tests"),
        (str(ROOT / "tests") + "/", "tests"),
    ],
)
def test_the_served_name_follows_the_model(model: str, name: str) -> None:
    assert table.resolve(Command.API, {"model": model}, {}).served_model_name == name
    assert table.resolve(Command.API, {"model": model, "served_model_name": "x"}, {}).served_model_name == "x"


def test_worker_ids_are_never_the_same() -> None:
    ids = [table.resolve(role, {}, {}).worker_id for role in ROLES for _ in range(2)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"(api|tokenizer|scheduler|detokenizer)-[\w-]+-\d+-[0-9a-f]{6}", i) for i in ids)


numbers = {
    "engine": st.sampled_from(["native", "null"]),
    "max_num_seqs": st.integers(1, 400).map(str),
    "partitions": st.integers(1, 8).map(str),
    "max_model_len": st.integers(1, 10**6).map(str),
    "queue_timeout": st.floats(0.1, 1e6).map(str),
    "max_body_bytes": st.integers(1024, 2**40).map(str),
    "api_keys": st.sampled_from(["a-secret", "a-secret,b-secret"]),
    "allowed_origins": st.sampled_from(["*", "https://a.example,http://b:80"]),
    "disable_access_log_for_endpoints": st.sampled_from(["/health", "/a,/b"]),
    "redis_url": st.sampled_from(["redis://:secret@127.0.0.1:1/0", "redis://localhost"]),
}


@given(st.fixed_dictionaries({}, optional=numbers), st.sampled_from(ROLES))
def test_children_get_the_settings_of_their_parent(flags: dict[str, str], role: Command) -> None:
    parent = table.resolve(Command.SERVE, {"max_num_batched_tokens": "512", **flags}, {})
    parent = replace(parent, worker_id="w-1", redis_url=parent.redis_url or "redis://127.0.0.1:7")
    arguments = table.to_arguments(parent, role)
    assert "secret" not in " ".join(arguments)
    parsed = vars(main.build_parser().parse_args([role, *arguments]))
    secrets = {name: v for name, v in table.child_environment(parent, role).items() if "MILLSTREAM" in name}
    child = table.resolve(role, parsed, secrets)
    for setting in table.settings_of(role):
        if setting.name != "listen_fd":
            assert getattr(child, setting.name) == getattr(parent, setting.name), setting.name


def test_children_do_not_see_our_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_PARTITIONS", "7")
    assert "MILLSTREAM_PARTITIONS" not in table.child_environment(Settings(), Command.SCHEDULER)


def test_the_command_line_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["serve", "--port", "many"]) == 2
    assert capsys.readouterr().err == (
        "millstream serve: --port must be a whole number from 0 to 65535, not 'many'\n"
    )


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["serve", "--help"])
    said = capsys.readouterr().out
    for setting in table.settings_of(Command.SERVE):
        assert setting.flag in said


def test_the_readme_lists_every_setting() -> None:
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- settings -->\n(.*?)\n<!-- /settings -->", readme, re.DOTALL)
    assert found, "README.md has no table between <!-- settings --> and <!-- /settings -->"
    assert found[1] == markdown_table(), "make the table again: python -m cli.readme"


def test_every_setting_is_documented() -> None:
    assert all(setting.spec.help.endswith(".") and setting.spec.commands for setting in TABLE)


@pytest.mark.parametrize("file", ["docker-compose.yml", "README.md", "Makefile", *DOCS])
def test_documents_name_only_settings_that_exist(file: str) -> None:
    named = set(re.findall(r"MILLSTREAM_[A-Z_]*[A-Z]", (ROOT / file).read_text()))
    assert named <= {setting.env for setting in TABLE}


def test_every_setting_is_used() -> None:
    read = {
        node.attr
        for module in modules()
        if module.name != "common.settings"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
    }
    # No setting may promise what nobody does.
    assert {setting.name for setting in TABLE} <= read
