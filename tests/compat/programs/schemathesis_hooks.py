"""What schemathesis cannot know of the server: its model, a request of it, and what no schema can say."""

from __future__ import annotations

import json
import os
import urllib.request

import schemathesis

URL, MODEL = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]
#: What is wrong with these depends on the model, its vocabulary and context, or on two fields together.
BEYOND_SCHEMAS = {
    *("prompt", "messages", "tokens", "stop_token_ids", "logit_bias", "min_tokens", "n", "best_of"),
    *("continue_final_message", "after", "truncate_prompt_tokens", "prompt_logprobs", "logprobs"),
}


def _generation() -> str:
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 3}).encode()
    headers = {"content-type": "application/json", "millstream-resume": "3600"}
    request = urllib.request.Request(f"{URL}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.headers["millstream-request"])


GENERATION = _generation()


@schemathesis.hook
def before_call(context, case, kwargs):
    """The model that is served in place of any other, and for every second name the one that is there."""
    body = case.body
    if isinstance(body, dict) and isinstance(body.get("model"), str) and body["model"]:
        case.body = {**body, "model": MODEL}
    name = (case.path_parameters or {}).get("name")
    if isinstance(name, str) and len(name) % 2 == 0:
        is_model = case.path.startswith("/v1/models")
        case.path_parameters = {"name": MODEL if is_model else GENERATION}


@schemathesis.check
def refused_only_for_what_no_schema_says(ctx, response, case):
    """A body as the schema wants it is refused for nothing else."""
    if response.status_code != 400 or not case.meta or not case.meta.generation.mode.is_positive:
        return
    error = response.json()["error"]
    param = (error["param"] or "").partition("[")[0]
    # To a JSON schema 1.0 is an integer.
    is_number = "Input should be a valid integer" in error["message"]
    assert param in BEYOND_SCHEMAS or is_number, error
