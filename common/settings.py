"""Every setting, once: its flag, its `MILLSTREAM_*` variable, its default, its meaning and who takes it.

The fields of `Settings` are the table from which the argument parsers and the configuration table of the
README are made. The environment is read in this file and nowhere else.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from common.kinds import Kind, byte_size, choice, count, json_object, seconds, switch, text, words

ENV_PREFIX = "MILLSTREAM_"
#: The model that ships with the installation, under the name it is served as.
BUNDLED_MODEL = "smollm2-135m-instruct"
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379"


class Command(StrEnum):
    """The subcommands of `millstream`: everything at once, the roles (each one process), and tools."""

    SERVE = "serve"
    API = "api"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    DETOKENIZER = "detokenizer"
    KEYS = "keys"


ROLES = (Command.TOKENIZER, Command.SCHEDULER, Command.DETOKENIZER, Command.API)

#: Settings whose default depends on others: a value equal to the plain default still has to be said.
_DEPENDENT = frozenset({"max_num_seqs"})

_ALL = (Command.SERVE, *ROLES)
_REDIS = (*_ALL, Command.KEYS)
_SERVE = (Command.SERVE,)
_HTTP = (Command.SERVE, Command.API)
_ENGINE = (Command.SERVE, Command.SCHEDULER)
_TEXT = (Command.SERVE, Command.TOKENIZER)


class SettingsError(Exception):
    """A flag or a variable has a value that cannot be used; the message is one line for the terminal."""


@dataclass(frozen=True, slots=True)
class _Spec:
    """What the table knows of a field beside its name and default."""

    kind: Kind
    help: str
    commands: tuple[Command, ...]
    default_text: str
    secret: bool
    internal: bool
    flag: str


def _setting(
    default: Any,
    kind: Kind,
    commands: tuple[Command, ...],
    help_text: str,
    *,
    default_text: str = "",
    secret: bool = False,
    internal: bool = False,
    flag: str = "",
) -> Any:
    """A field of `Settings`. ``secret`` keeps it off command lines, ``internal`` out of help and README."""
    spec = _Spec(kind, help_text, commands, default_text or kind.show(default), secret, internal, flag)
    return field(default=default, metadata={"spec": spec})


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a process, read once at its start. A command ignores the ones it does not take."""

    host: str = _setting("127.0.0.1", text(), _HTTP, "Address the API listens on.")
    port: int = _setting(8000, count(0, 65535), _HTTP, "Port the API listens on; 0 takes a free one.")
    api_replicas: int = _setting(1, count(1, 64), _SERVE, "API processes that share the port.")
    max_body_bytes: int = _setting(
        8 << 20, byte_size(1024), _HTTP, "Largest request body; larger ones get 413."
    )

    auth: str = _setting(
        "auto",
        choice("auto", "required", "off"),
        _HTTP,
        "Who needs an API key. `auto`: all, once there is any key or when not only this machine can connect.",
    )
    api_keys: tuple[str, ...] = _setting(
        (),
        words(r"[\x21-\x2b\x2d-\x7e]{1,512}", "keys of printable characters without spaces", least=1),
        _HTTP,
        "API key that is accepted, besides those in Redis; may be repeated.",
        default_text="none",
        secret=True,
        flag="--api-key",
    )
    api_key_file: str = _setting(
        "", text(), _HTTP, "File of such keys, each on a line, a tenant may follow.", default_text="none"
    )
    allowed_origins: tuple[str, ...] = _setting(
        (),
        words(r"\*|https?://[^\s/,?#]+", "`*` or origins like https://example.com"),
        _HTTP,
        "Origins whose pages may call the API from a browser (CORS); `*` is all.",
        default_text="none",
    )
    ssl_certfile: str = _setting(
        "", text(), _HTTP, "Certificate chain (PEM): the API speaks HTTPS.", default_text="none"
    )
    ssl_keyfile: str = _setting(
        "", text(), _HTTP, "Private key (PEM) of the certificate.", default_text="none"
    )
    access_log: str = _setting("on", choice("on", "off"), _HTTP, "Log a line for each HTTP request.")
    disable_access_log_for_endpoints: tuple[str, ...] = _setting(
        ("/health", "/ready"), words(r"/\S*", "paths"), _HTTP, "Paths whose requests are not logged."
    )

    model: str = _setting(
        BUNDLED_MODEL, text(), _ALL, "A folder, a `.gguf` file, a hub id, or the bundled model's name."
    )
    served_model_name: str = _setting(
        "", text(), _ALL, "Name clients use for the model.", default_text="from `--model`"
    )
    served_model_aliases: str = _setting(
        "", text(), _ENGINE, "More names for the model, separated by commas.", default_text="none"
    )
    generation_config: str = _setting(
        "auto",
        text(),
        _ENGINE,
        "Where sampling defaults come from: `auto` (the model), `vllm` (nowhere), a folder or a JSON file.",
    )
    override_generation_config: str = _setting(
        "{}", json_object(), _ENGINE, "Sampling defaults that replace those."
    )
    chat_template: str = _setting(
        "", text(), _TEXT, "File with a chat template to use.", default_text="the model's own"
    )
    default_chat_template_kwargs: str = _setting(
        "{}", json_object(), (*_HTTP, Command.TOKENIZER), "Template variables that requests leave out."
    )
    reasoning_parser: str = _setting(
        "none", choice("none", "deepseek_r1", "qwen3"), _HTTP, "How to tell reasoning from a chat's content."
    )
    max_model_len: int | None = _setting(
        None,
        count(1),
        _ALL,
        "Most tokens of prompt and answer together; never more than the model's own.",
        default_text="the model's own",
    )
    dtype: str = _setting("bfloat16", choice("bfloat16", "float32"), _ENGINE, "Number format of the engine.")
    engine: str = _setting(
        "native", choice("native", "null"), _ALL, "`null` makes tokens without a model, to test the bus."
    )
    null_step_ms: float = _setting(
        10.0, seconds(0.0), _ENGINE, "Milliseconds a step of the null engine takes."
    )
    max_num_seqs: int = _setting(
        32, count(1, 4096), _ENGINE, "Most generations in one batch.", default_text="32; null engine: 256"
    )
    max_num_batched_tokens: int = _setting(
        512, count(1), _ENGINE, "Tokens computed in one step, which bounds the gap between two tokens."
    )
    kv_cache_tokens: int | None = _setting(
        None, count(16), _ENGINE, "Tokens the KV cache holds.", default_text="from free memory, bounded"
    )
    block_size: int = _setting(16, count(1, 256), _ENGINE, "Tokens in a block of the KV cache.")

    redis_url: str = _setting(
        "",
        text(),
        _REDIS,
        "Redis or Valkey to use.",
        default_text=f"`serve`: embedded; else `{DEFAULT_REDIS_URL}`",
        secret=True,
    )
    partitions: int = _setting(
        0,
        count(0, 256),
        _ALL,
        "Partitions of the bus, for all processes; 0 takes what the Redis was set up with.",
        default_text="`0`; a new Redis gets 2, the embedded one 1",
    )
    key_prefix: str = _setting("ms", text(r"[A-Za-z0-9_.-]+"), _REDIS, "First part of every key in Redis.")
    redis_maxmemory: int = _setting(
        1 << 30, byte_size(16 << 20), _SERVE, "Memory limit of the embedded Valkey."
    )
    data_dir: str = _setting(
        "", text(), _SERVE, "Folder of the embedded Valkey's data.", default_text="private, removed at exit"
    )
    appendfsync: str = _setting(
        "everysec",
        choice("everysec", "always"),
        _SERVE,
        "When the embedded Valkey syncs its file; `always` loses nothing with the host, and is slower.",
    )
    max_redis_bytes: int = _setting(
        0, byte_size(), _HTTP, "Admission stops at 80 % of this.", default_text="Redis's own `maxmemory`"
    )

    max_queued_requests: int | None = _setting(
        None,
        count(1),
        _HTTP,
        "Most requests that wait for a worker; then 429.",
        default_text="half as many as run at once, at least 16; batch: 256",
    )
    max_queued_bytes: int = _setting(
        64 << 20, byte_size(1024), _HTTP, "Most bytes of prompts in flight; then 429."
    )
    request_timeout: float = _setting(600.0, seconds(0.1), _ALL, "Seconds a request may take altogether.")
    queue_timeout: float = _setting(
        60.0, seconds(0.1), _ALL, "Seconds a request may wait for a scheduler; then 503."
    )
    slow_reader_timeout: float = _setting(
        60.0, seconds(0.1), _HTTP, "Seconds a stream's reader may stay behind; then its connection is cut."
    )
    sse_keep_alive_interval: float = _setting(
        15.0, seconds(0.0), _HTTP, "Most seconds a stream is silent before it gets a comment; 0: for ever."
    )
    enable_force_include_usage: bool = _setting(
        False, switch(), _HTTP, "Have every stream end with its usage."
    )
    strict_fields: bool = _setting(
        False, switch(), _HTTP, "Refuse requests with unknown fields, instead of ignoring these."
    )
    reply_ttl: float = _setting(300.0, seconds(1.0), _ALL, "Seconds a finished reply stays readable.")
    deadline_grace: float = _setting(60.0, seconds(1.0), _ALL, "Seconds keys outlive their deadline.")
    lease_ms: int = _setting(
        3000, count(300, 60_000), _ALL, "Milliseconds without renewal after which a process counts as dead."
    )
    shutdown_grace: float = _setting(
        30.0, seconds(0.0), _ALL, "Seconds running requests may take to finish at shutdown."
    )

    log_level: str = _setting(
        "info", choice("debug", "info", "warning", "error"), _REDIS, "Least severe messages to print."
    )
    log_format: str = _setting("text", choice("text", "json"), _REDIS, "Form of a log line.")

    worker_id: str = _setting("", text(r"[A-Za-z0-9_.-]+"), ROLES, "Name of this process.", internal=True)
    listen_fd: int = _setting(-1, count(-1), (Command.API,), "Inherited listening socket.", internal=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    default: Any
    spec: _Spec

    @property
    def flag(self) -> str:
        """The command line flag."""
        return self.spec.flag or "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper()

    def parse(self, source: str, raw: str) -> Any:
        """The value written as ``raw`` in ``source`` (the flag or the variable)."""
        try:
            return self.spec.kind.parse(raw)
        except ValueError as error:
            given = "" if self.spec.secret else f", not {raw!r}"
            raise SettingsError(f"{source} {error}{given}") from None


TABLE: tuple[Setting, ...] = tuple(
    Setting(each.name, each.default, each.metadata["spec"]) for each in fields(Settings)
)


def settings_of(command: Command) -> tuple[Setting, ...]:
    """The settings that ``command`` takes."""
    return tuple(setting for setting in TABLE if command in setting.spec.commands)


#: What a parser of arguments found: field names with raw text, or with all texts of a repeated flag.
Flags = Mapping[str, str | Sequence[str] | None]


def resolve(command: Command, flags: Flags, environ: Mapping[str, str]) -> Settings:
    """Settings of ``command``: a flag wins over a variable, a variable over the default.

    An empty variable counts as unset, as compose files and charts write them.
    """
    given: dict[str, Any] = {}
    for setting in settings_of(command):
        raw = flags.get(setting.name)
        if raw is not None:
            given[setting.name] = setting.parse(setting.flag, raw if isinstance(raw, str) else ",".join(raw))
        elif environ.get(setting.env):
            given[setting.name] = setting.parse(setting.env, environ[setting.env])
    return _complete(command, given)


def from_environment(command: Command, flags: Flags) -> Settings:
    """`resolve` with this process's environment: the one place that reads it."""
    return resolve(command, flags, os.environ)


def _complete(command: Command, given: dict[str, Any]) -> Settings:
    """Fill in the defaults that depend on other settings, and check what must fit together."""
    if given.get("engine") == "null":
        given.setdefault("max_num_seqs", 256)
    settings = Settings(**given)
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise SettingsError(
            f"--max-num-batched-tokens ({settings.max_num_batched_tokens}) must be at least "
            f"--max-num-seqs ({settings.max_num_seqs}): every running request computes a token per step"
        )
    _check_access(settings)
    if command is not Command.SERVE:
        settings = replace(
            settings,
            redis_url=settings.redis_url or DEFAULT_REDIS_URL,
            worker_id=settings.worker_id or new_worker_id(command, os.getpid()),
        )
    return replace(settings, served_model_name=settings.served_model_name or _served_name(settings.model))


def _check_access(settings: Settings) -> None:
    if settings.auth == "off" and (settings.api_keys or settings.api_key_file):
        raise SettingsError("--auth off and API keys contradict each other")
    if bool(settings.ssl_certfile) != bool(settings.ssl_keyfile):
        raise SettingsError("--ssl-certfile and --ssl-keyfile need each other")
    if "*" in settings.allowed_origins and len(settings.allowed_origins) > 1:
        raise SettingsError("--allowed-origins * already allows every origin")


def _served_name(model: str) -> str:
    """A file's or folder's own name; a hub id or the bundled model as it is."""
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else model


def new_worker_id(command: Command, number: int) -> str:
    """A name no other process ever had: `<role>-<host>-<number>-<random>`."""
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40]
    return f"{command}-{host}-{number}-{secrets.token_hex(3)}"


def to_arguments(settings: Settings, command: Command) -> list[str]:
    """The flags with which a process of role ``command`` gets these settings. Secrets travel elsewhere."""
    arguments: list[str] = []
    for setting in settings_of(command):
        value = getattr(settings, setting.name)
        by_default = value == setting.default and setting.name not in _DEPENDENT
        if not by_default and not setting.spec.secret:
            arguments += [setting.flag, setting.spec.kind.write(value)]
    return arguments


def child_environment(settings: Settings, command: Command) -> dict[str, str]:
    """The environment for a process started with `to_arguments`.

    Our own variables are left out, since the arguments say all and a default must not be overridden;
    secrets are put in, since other users of the machine can read command lines.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    for setting in settings_of(command):
        value = getattr(settings, setting.name)
        if setting.spec.secret and value != setting.default:
            environment[setting.env] = setting.spec.kind.write(value)
    return environment


def bound_spinning() -> None:
    """Have OpenMP's threads wait for each other awake for about half a millisecond, then asleep.

    By default they spin for ever. On a machine without a core to spare that takes the processor from the
    other roles, and from the very thread that is waited for: a step can then take ten times as long. To sleep
    at once costs a third of a step on a machine that has the cores. OpenMP looks once, when torch is
    imported; what the environment says already is left as it is.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
        os.environ["OMP_WAIT_POLICY"] = "passive"  # for runtimes other than libgomp
