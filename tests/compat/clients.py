"""The clients: what each needs, what is run with it, and against which server."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.compat import harness
from tests.compat.outcome import Outcome
from tests.compat.rooms import PROGRAMS, NodeRoom, PythonRoom
from tests.compat.servers import Servers
from tests.compat.suites import node_suite, python_suite
from tests.helpers.bombarding import Bombardment
from tests.helpers.text import BUNDLED

_PYTEST = ("pytest", "pytest-asyncio")
#: Of made-up requests: each round is as many of them again as bytes that are no request.
_ROUNDS, _EXAMPLES = 10, 500
_FRANCE, _ANSWER = "What is the capital of France?", "The capital of France is Paris."


def openai(servers: Servers) -> Outcome:
    room = PythonRoom("openai", "openai", *_PYTEST)
    room.prepare()
    tally = python_suite(room, "openai_python", servers.environment("model", busy="busy"))
    what = "chat, completions, streams, async, raw responses, errors, timeouts, retries"
    return Outcome("openai (Python)", room.version("openai"), what, tally.result, good=True)


def node(servers: Servers) -> Outcome:
    room = NodeRoom("node", "openai")
    room.prepare()
    tally = node_suite(room, "openai_node", servers.environment("model"))
    what = "chat, completions, streams, raw responses, errors, timeouts"
    return Outcome("openai (Node)", room.version("openai"), what, tally.result, good=True)


def langchain(servers: Servers) -> Outcome:
    room = PythonRoom("langchain", "langchain-openai", "langchain-tests", *_PYTEST)
    room.prepare()
    tally = python_suite(room, "langchain_chat", servers.environment("model"))
    version = f"{room.version('langchain-openai')}, tests {room.version('langchain-tests')}"
    notes = "skipped: tools, structured output, images and what belongs to them"
    what = "`ChatModelIntegrationTests`, whole"
    return Outcome("langchain-openai", version, what, tally.result, good=True, notes=notes)


def litellm(servers: Servers) -> Outcome:
    room = PythonRoom("litellm", "litellm", *_PYTEST)
    room.prepare()
    tally = python_suite(room, "litellm_calls", servers.environment("model"))
    what = "completion, stream, acompletion, text_completion, errors"
    return Outcome("litellm", room.version("litellm"), what, tally.result, good=True)


def llm(servers: Servers) -> Outcome:
    room = PythonRoom("llm", "llm")
    room.prepare()
    stack = servers.get("model")
    entry = f"- model_id: ms\n  model_name: {BUNDLED}\n  api_base: {stack.base_url}/v1\n"
    (room.folder / "extra-openai-models.yaml").write_text(entry)
    env = {"LLM_USER_PATH": str(room.folder), "OPENAI_API_KEY": "none"}
    passed = 0
    for more in ((), ("--no-stream",), ("--async",)):
        printed = room.run(room.bin / "llm", "-m", "ms", "-o", "temperature", "0", *more, _FRANCE, env=env)
        assert printed.strip() == _ANSWER, printed
        passed += 1
    printed = room.run(room.bin / "llm", "-c", "And of Spain?", env=env)
    assert printed.strip(), "a conversation goes on"
    failed = room.run(
        room.bin / "llm", "-m", "ms", "-o", "temperature", "0", "word " * 9000, env=env, fails=True
    )
    assert "maximum context length is" in failed, failed
    passed += 2
    what = "a prompt streamed, whole and async, a conversation, an error"
    return Outcome("llm", room.version("llm"), what, f"{passed} passed", good=True)


def lm_eval(servers: Servers) -> Outcome:
    room = PythonRoom("lm-eval", "lm-eval[api]", "transformers")
    room.prepare()
    scores = harness.run(room, servers.get("model").base_url)
    what = "`local-completions`: loglikelihood and generate_until, 50 items each"
    result = f"{scores.items} items as transformers; largest difference {scores.largest:.1g}"
    return Outcome("lm-eval", room.version("lm_eval"), what, result, good=True)


def bench(servers: Servers) -> Outcome:
    room = PythonRoom("bench", "aiohttp")
    room.prepare()
    printed = room.run(room.bin / "python", PROGRAMS / "bench_serve.py", env=servers.environment("null"))
    said = json.loads(printed.splitlines()[-1])
    assert said["failed"] == 0, printed
    assert said["output_tokens"] == said["wanted_tokens"], printed
    what = f"{said['requests']} streams of token-id prompts with `ignore_eos` and `include_usage`"
    result = f"{said['requests']} passed"
    notes = "the requests that `vllm bench serve` sends; vllm itself is some gigabytes"
    return Outcome("vllm bench serve", "its requests", what, result, good=True, notes=notes)


def schemathesis(servers: Servers) -> Outcome:
    room = PythonRoom("schemathesis", "schemathesis")
    room.prepare()
    stack = servers.get("null")
    pids = {role: stack.pids(role) for role in ("api", "tokenizer", "scheduler", "detokenizer")}
    printed = room.run(
        *(room.bin / "schemathesis", "--config-file", PROGRAMS / "schemathesis.toml", "run"),
        *(f"{stack.base_url}/openapi.json", "--max-examples", "100", "--continue-on-failure", "--no-shrink"),
        *("--request-timeout", "60", "--suppress-health-check", "all", "--warnings", "off"),
        env=servers.environment("null")
        | {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(PROGRAMS)},
    )
    assert {role: stack.pids(role) for role in pids} == pids
    cases = next(line.strip() for line in printed.splitlines() if "generated" in line)
    what = "`/openapi.json`: every endpoint, all checks but one"
    notes = "positive_data_acceptance is one of our own, which knows what no schema can say"
    return Outcome("schemathesis", room.version("schemathesis"), what, cases, good=True, notes=notes)


def fuzz(servers: Servers) -> Outcome:
    bombardment = Bombardment(servers.get("null"))
    for start in range(_ROUNDS):
        bombardment.run(_EXAMPLES, start)
        print(f"  ... {bombardment.statuses.total()} requests", flush=True)
    sent = bombardment.statuses
    right = sent[200]
    what = "made-up requests, right and wrong, and a neighbour's in between"
    result = f"{sent.total()} sent, {right} answered with 200, {sent.total() - right} refused"
    return Outcome(
        "fuzz", "hypothesis", what, result, good=True, notes="no 5xx, no hang, same processes after"
    )


CLIENTS: dict[str, Callable[[Servers], Outcome]] = {
    "openai": openai,
    "node": node,
    "langchain": langchain,
    "litellm": litellm,
    "llm": llm,
    "lm-eval": lm_eval,
    "bench": bench,
    "schemathesis": schemathesis,
    "fuzz": fuzz,
}
