"""Strategies for requests of every kind: right ones, nearly right ones, and such as nobody would send."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote_from_bytes

from hypothesis import strategies as st

from api.schemas import unsupported
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from tests.helpers.raw_http import Raw
from tests.helpers.text import BUNDLED

Strategy = st.SearchStrategy[Any]

JSON_TYPE = (b"content-type", b"application/json")
#: Longer than what one read of the server's socket brings, and than a head may be.
_LONG_HEADER = 100_000

_words = st.text(max_size=6)
_flags = st.sampled_from([None, True, False])
_ids = st.integers(0, 49_151)
_penalties = st.floats(-2, 2) | st.none()
_roles = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
_contents = _words | st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": _words}) | _words, max_size=3
)
_messages = st.lists(
    st.fixed_dictionaries({"role": _roles, "content": _contents}, optional={"name": _words}),
    min_size=1,
    max_size=3,
)
#: Characters for which the bundled model has no token: a prompt of nothing else is empty.
_UNKNOWN = "\x04\x06\x13\x14\x16\x1d"
_some_text = st.text(min_size=1, max_size=6).filter(lambda text: bool(text.strip(_UNKNOWN)))
_prompts = st.one_of(
    _some_text,
    st.lists(_ids, min_size=1, max_size=6),
    st.lists(_some_text, min_size=1, max_size=3),
    st.lists(st.lists(_ids, min_size=1, max_size=4), min_size=1, max_size=3),
)
_sampling: dict[str, Strategy] = {
    "n": st.integers(1, 3) | st.none(),
    "max_tokens": st.integers(1, 12) | st.none(),
    "min_tokens": st.integers(0, 1) | st.none(),
    "temperature": st.floats(0, 2) | st.none(),
    "top_p": st.floats(0, 1) | st.none(),
    "top_k": st.integers(-1, 2**63 - 1) | st.none(),
    "min_p": st.floats(0, 1) | st.none(),
    "presence_penalty": _penalties,
    "frequency_penalty": _penalties,
    "repetition_penalty": st.floats(0.01, 100) | st.none(),
    "logit_bias": st.dictionaries(_ids.map(str), st.floats(-100, 100), max_size=3) | st.none(),
    "seed": st.integers(-(2**63), 2**63 - 1) | st.none(),
    "stop": st.text(min_size=1, max_size=3)
    | st.lists(st.text(min_size=1, max_size=3), max_size=4)
    | st.none(),
    "stop_token_ids": st.lists(_ids, max_size=4) | st.none(),
    "include_stop_str_in_output": _flags,
    "ignore_eos": _flags,
    "skip_special_tokens": _flags,
    "add_special_tokens": _flags,
    "service_tier": st.sampled_from([None, "auto", "default", "flex", "priority", "scale"]),
    "user": _words,
    "metadata": st.dictionaries(_words, _words, max_size=2),
    "something_unknown": _words | st.none(),
}
_streaming = st.just({"stream": False}) | st.fixed_dictionaries(
    {"stream": st.just(True)},
    optional={
        "stream_options": st.fixed_dictionaries(
            {}, optional={"include_usage": _flags, "continuous_usage_stats": _flags, "x": _words}
        )
    },
)
_model = {"model": st.just(BUNDLED)}


def _joined(*parts: Strategy) -> Strategy:
    return st.tuples(*parts).map(lambda made: {name: value for part in made for name, value in part.items()})


#: Bodies that are right, by path.
RIGHT: dict[bytes, Strategy] = {
    b"/v1/chat/completions": _joined(
        st.fixed_dictionaries(
            _model | {"messages": _messages},
            optional=_sampling
            | {
                "max_completion_tokens": st.integers(1, 12),
                "chat_template_kwargs": st.dictionaries(_words, _words, max_size=2),
                "reasoning_effort": _words,
            },
        ),
        _streaming,
    ),
    b"/v1/completions": _joined(
        st.fixed_dictionaries(_model | {"prompt": _prompts}, optional=_sampling), _streaming
    ),
    b"/tokenize": st.fixed_dictionaries(
        {"prompt": st.text(min_size=1, max_size=20)},
        optional={"add_special_tokens": _flags, "return_token_strs": _flags},
    )
    | st.fixed_dictionaries({"messages": _messages}, optional={"return_token_strs": _flags}),
    b"/detokenize": st.fixed_dictionaries({"tokens": st.lists(_ids, max_size=8)}, optional=_model),
}

_NAMES = sorted(
    {
        *ChatRequest.model_fields,
        *CompletionRequest.model_fields,
        *TokenizeRequest.model_fields,
        *DetokenizeRequest.model_fields,
        *unsupported.CHAT,
        *unsupported.COMPLETION,
    }
)
#: JSON texts of values that break parsers, encoders, arithmetic or templates somewhere.
_ATOMS: list[bytes] = [
    *(b"null", b"true", b"false", b"0", b"-0", b"0.0", b"1", b"-1", b'""', b'"x"', b"[]", b"{}"),
    *(b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"1e-400", b"1.7976931348623157e308"),
    *(b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"18446744073709551616"),
    *(b"9" * 5000, b"1e30", b"0.1e1", b"01", b"+1", b".5", b"0x10", b"1_000"),
    *(rb'"\ud800"', rb'"\udc00\ud800"', rb'"a\u0000b"', rb'"\x"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\n"'),
    *("\u2028\U0001f600\ufffd\u202e".encode().join([b'"', b'"']), b'"%s%n{{7*7}}{% for %}"', b"'x'"),
    *(b"[" * 100 + b"]" * 100, b"[" * 5000, b'{"a":' * 200 + b"1" + b"}" * 200, b'{"a":1,"a":2}'),
    *(b'["%b"]' % (b"y" * 5000), b"[%b]" % b",".join([b"1"] * 2000), b'{"__proto__":{"x":1}}'),
]
_values = st.recursive(
    st.sampled_from(_ATOMS)
    | st.integers().map(lambda value: b"%d" % value)
    | st.floats().map(lambda value: repr(value).encode())
    | st.text(max_size=10).map(lambda value: json.dumps(value).encode()),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: b"[%b]" % b",".join(items))
        | st.lists(st.tuples(st.text(max_size=5), inner), max_size=3).map(
            lambda pairs: _object([(json.dumps(name).encode(), value) for name, value in pairs])
        )
    ),
    max_leaves=6,
)
_field_names = st.sampled_from(_NAMES).map(lambda name: b'"%b"' % name.encode()) | st.sampled_from(
    [b'""', rb'"\ud83d"', b'"\xff"', b'"__class__"', b'"role"', b"role", b'"a\\u0000"']
)


def _object(pairs: list[tuple[bytes, bytes]]) -> bytes:
    return b"{%b}" % b",".join(name + b":" + value for name, value in pairs)


def _encoded(body: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    return [(json.dumps(name).encode(), json.dumps(value).encode()) for name, value in body.items()]


@st.composite
def _nearly_right(draw: st.DrawFn, right: Strategy) -> bytes:
    """A right body, of which something is replaced, given twice, or left out."""
    pairs = _encoded(draw(right))
    for _ in range(draw(st.integers(1, 3))):
        name, value = draw(_field_names), draw(_values)
        match draw(st.sampled_from(["add", "replace", "leave out", "in a message"])):
            case "add":
                pairs.append((name, value))
            case "replace" if pairs:
                at = draw(st.integers(0, len(pairs) - 1))
                pairs[at] = (pairs[at][0], value)
            case "leave out" if pairs:
                pairs.pop(draw(st.integers(0, len(pairs) - 1)))
            case _:
                said = _object([(b'"role"', b'"assistant"'), (name, value), (b'"content"', draw(_values))])
                pairs.append((b'"messages"', b"[%b]" % said))
    return _object(pairs)


@st.composite
def _broken(draw: st.DrawFn, right: Strategy) -> bytes:
    """A right body cut off, with a byte changed, or in another encoding; or no body at all."""
    text = json.dumps(draw(right), ensure_ascii=False).encode(errors="surrogatepass")
    at = draw(st.integers(0, len(text) - 1))
    return draw(
        st.sampled_from(
            [
                text[:at],
                text[:at] + bytes([draw(st.integers(0, 255))]) + text[at + 1 :],
                text.decode(errors="replace").encode("utf-16"),
                b"\xef\xbb\xbf" + text,
                text + text,
                b"[%b]" % text,
                b"data: %b\n\n" % text,
            ]
        )
        | st.binary(max_size=64)
        | _values
    )


right_requests = st.sampled_from(sorted(RIGHT)).flatmap(
    lambda path: RIGHT[path].map(
        lambda body: Raw(b"POST", path, (JSON_TYPE,), json.dumps(body, ensure_ascii=True).encode())
    )
)
_wrong_bodies = st.sampled_from(sorted(RIGHT)).flatmap(
    lambda path: st.builds(
        lambda body, chunked: Raw(b"POST", path, (JSON_TYPE,), body, chunked),
        _nearly_right(RIGHT[path]) | _broken(RIGHT[path]),
        st.booleans(),
    )
)
_header_values = st.one_of(
    st.binary(max_size=20).map(lambda value: value.replace(b"\r", b"").replace(b"\n", b"")),
    st.sampled_from([b"", b"0", b"-1", b"3600", b"99999999999999999999", b"1e3", b"x" * 300, "é€".encode()]),
)
_headers = st.lists(
    st.one_of(
        st.tuples(
            st.just(b"content-type"),
            st.sampled_from(
                [
                    b"application/json; charset=utf-16",
                    b"text/plain",
                    b"multipart/form-data; boundary=x",
                    b"application/x-www-form-urlencoded",
                    b"application/vnd.api+json",
                    b"",
                    b"application/json\x00",
                    b";;;",
                ]
            ),
        ),
        st.tuples(
            st.sampled_from(
                [
                    *(b"millstream-resume", b"last-event-id", b"x-request-id", b"authorization"),
                    *(b"accept", b"accept-encoding", b"content-encoding", b"cookie", b"origin", b"range"),
                    *(b"if-match", b"x-forwarded-for", b"x-http-method-override", b"content-type"),
                ]
            ),
            _header_values,
        ),
        st.just((b"expect", b"100-continue")),
        st.just((b"upgrade", b"websocket")),
        st.sampled_from([_LONG_HEADER, 20_000]).map(lambda size: (b"x-long", b"a" * size)),
        st.sampled_from([200, 5000]).map(lambda count: (b"x-many", b"\r\n".join([b"1"] + [b"y: 2"] * count))),
    ),
    max_size=3,
).map(tuple)
_names_of_things = st.binary(min_size=1, max_size=12).map(lambda raw: quote_from_bytes(raw).encode())
_paths = st.one_of(
    st.sampled_from(sorted(RIGHT)),
    st.sampled_from(
        [
            *(b"/", b"//", b"/v1", b"/v1/", b"/v1/models", b"/v1/models/", b"/v1/chat/completions/"),
            *(b"/health", b"/ready", b"/version", b"/openapi.json", b"/docs", b"/metrics", b"*"),
            *(b"/../../etc/passwd", b"/%2e%2e/%00", b"/v1/models/%ff%fe", "/v1/é/日本".encode(), b"/\xff"),
            *(b"http://x/v1/models", b"/" + b"a" * 5000, b"/v1/completions?" + b"q=" * 3000, b"/v1/models/#"),
        ]
    ),
    st.builds(
        lambda start, name, end: start + name + end,
        st.sampled_from([b"/v1/models/", b"/v1/requests/", b"/v1/streams/", b"/v1/streams/chatcmpl-", b"/"]),
        _names_of_things | st.sampled_from([b"0-" + b"0" * 32, b"1-01a22cd105a07c49990fef49091765a7"]),
        st.sampled_from([b"", b"/cancel", b"?after=", b"?after=1-1", b"?after=%ff&after=2", b"/"]),
    ),
)
_methods = st.sampled_from(
    [b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"HEAD", b"OPTIONS", b"TRACE", b"FOO", b"get", b"PROPFIND"]
)
_strange_requests = st.builds(
    Raw, _methods, _paths, _headers, _nearly_right(RIGHT[b"/v1/completions"]) | st.binary(max_size=32)
)
_strange_headers = st.builds(
    lambda request, headers: Raw(request.method, request.path, request.headers + headers, request.body),
    right_requests,
    _headers,
)
#: Requests that may be wrong in any way.
any_requests = st.one_of(_wrong_bodies, _wrong_bodies, _strange_requests, _strange_headers)
#: Bytes that are no request.
garbage = st.binary(min_size=1, max_size=200).map(lambda data: data + b"\r\n\r\n\r\n\r\n")
