"""What clients and operators of an OpenAI server rely on, and for each the tests that hold it.

The rows are the MUSTs and SHOULDs of the surface: fields, shapes, text, errors, the life of a server.
"""

from __future__ import annotations

import ast
import functools

import pytest

from tests.helpers.source import ROOT

FIELDS = "integration/test_rows_fields.py::test_"
SCHEMAS = "unit/test_api_schemas.py::test_"
EVENTS = "unit/test_api_events.py::test_"
ANSWERS = "integration/test_api_answers.py::test_"
REFUSALS = "integration/test_api_refusals.py::test_"
OFFICIAL = "integration/test_openai_client.py::test_"
TEXTS = "golden/test_text_smollm2.py::test_"
STREAM = "unit/test_text_stream.py::test_"
MESSAGES = "unit/test_text_messages.py::test_"
TEMPLATES = "unit/test_text_chat.py::test_"
SAMPLER = "unit/test_sampler.py::test_"
LIFE = "integration/test_api_lifecycle.py::test_"
SHAPES = "integration/test_described_answers.py::test_"
_GOOD_BAD = (FIELDS + "values_that_are_served", FIELDS + "values_that_are_refused")

ROWS: dict[str, tuple[str, ...]] = {
    # Chat requests
    "model": (REFUSALS + "an_unknown_model", ANSWERS + "an_alias_is_answered_under_its_own_name"),
    "messages: text": (ANSWERS + "a_chat", REFUSALS + "bad_bodies"),
    "messages: parts": (MESSAGES + "content", FIELDS + "contents_that_are_served"),
    "messages: null": (MESSAGES + "a_null_is_no_content", FIELDS + "contents_that_are_refused"),
    "messages: role developer": (MESSAGES + "developer_is_system_where_it_is_not_known",),
    "messages: role tool, tool_calls": (MESSAGES + "arguments_of_tool_calls", TEMPLATES + "tools_and_calls"),
    "messages: extra keys": (
        SCHEMAS + "our_own_messages_can_be_replayed",
        MESSAGES + "nulls_and_empty_lists_are_dropped_and_extra_keys_kept",
    ),
    "max_tokens, max_completion_tokens": (
        SCHEMAS + "max_completion_tokens_wins",
        "integration/test_context_length.py::test_the_context_length_ends_an_answer",
        *_GOOD_BAD,
    ),
    "temperature": (SCHEMAS + "what_means_greedy_is_greedy", *_GOOD_BAD),
    "top_p": (SCHEMAS + "what_means_greedy_is_greedy", *_GOOD_BAD),
    "n": (OFFICIAL + "samples_are_independent_and_repeatable", *_GOOD_BAD),
    "stream": (SCHEMAS + "null_is_the_same_as_left_out", ANSWERS + "a_stream_adds_up_to_the_whole"),
    "stream_options": (EVENTS + "a_chat_stream_with_usage", SCHEMAS + "stream_options_need_a_stream"),
    "stop": (TEXTS + "fx1_stop_strings", *_GOOD_BAD),
    "stop_token_ids": (STREAM + "a_stop_token_id_is_reported_and_hidden", *_GOOD_BAD),
    "include_stop_str_in_output": (STREAM + "an_included_stop_string_is_kept_to_its_end",),
    "ignore_eos": ("unit/test_engine_request.py::test_endings",),
    "top_k": (SCHEMAS + "top_k_is_off", *_GOOD_BAD),
    "min_p": (SAMPLER + "prefilters_keep_exactly_what_a_full_sort_keeps", *_GOOD_BAD),
    "repetition, presence and frequency penalty": (
        SAMPLER + "penalties_follow_their_formulas_over_a_generation",
        SAMPLER + "a_continued_generation_goes_on_as_the_undisturbed_one",
        *_GOOD_BAD,
    ),
    "logit_bias": (SAMPLER + "masked_ids_are_never_chosen_and_bias_reaches_its_id", *_GOOD_BAD),
    "seed": (SAMPLER + "a_row_does_not_depend_on_its_batch_mates", *_GOOD_BAD),
    "response_format": (SCHEMAS + "what_would_change_the_answer_is_refused_by_name", *_GOOD_BAD),
    "tools, tool_choice": (
        FIELDS + "values_that_are_served_in_chats",
        FIELDS + "values_that_are_refused_in_chats",
    ),
    "reasoning_effort, chat_template_kwargs": (
        SCHEMAS + "arguments_of_the_template_go_on_to_it",
        TEMPLATES + "options_cannot_take_over",
    ),
    "continue_final_message, add_generation_prompt": (
        TEXTS + "fx9_the_last_message_is_left_open",
        SCHEMAS + "the_last_message_can_be_left_open",
    ),
    "skip_special_tokens": (STREAM + "special_tokens_inside_are_hidden_or_shown",),
    "user, safety_identifier, prompt_cache_key": (
        "unit/test_api_docs.py::test_what_is_said_to_be_ignored_is_ignored",
    ),
    "metadata, store, service_tier, modalities, prediction, verbosity": (
        *_GOOD_BAD,
        FIELDS + "values_that_are_refused_in_chats",
        SCHEMAS + "the_service_tier_is_the_class_of_work",
    ),
    "request id in": ("unit/test_api_errors.py::test_a_clients_own_request_id_is_a_label",),
    "unknown fields": (
        SCHEMAS + "harmless_and_unknown_fields_are_accepted",
        FIELDS + "values_that_are_served",
    ),
    # Completions
    "prompt: text": (FIELDS + "prompts_that_are_served", REFUSALS + "bad_prompts"),
    "prompt: list of texts": (
        ANSWERS + "a_completion_of_several_prompts",
        FIELDS + "prompts_that_are_refused",
    ),
    "prompt: token ids": (SCHEMAS + "prompts_of_every_form", FIELDS + "prompts_that_are_served"),
    "prompt: list of token ids": (SCHEMAS + "prompts_of_every_form", FIELDS + "prompts_that_are_refused"),
    "max_tokens of completions": (FIELDS + "prompts_that_are_served",),
    "no second first token in chats": ("unit/test_tokenizer_jobs.py::test_chat",),
    "add_special_tokens": ("unit/test_text_codec.py::test_tokens_around_a_text",),
    # Answers and streams
    "a whole answer": (SHAPES + "whole_answers", EVENTS + "a_collected_chat"),
    "choices in order": (EVENTS + "a_collected_completion_has_its_choices_in_order",),
    "finish_reason": (SHAPES + "whole_answers", ANSWERS + "what_stopped_it_is_told"),
    "usage counts the end id, and a prompt once": (
        STREAM + "an_end_id_is_counted_and_rarely_shown",
        TEXTS + "fx6_the_chat_prompt_and_its_answer",
        ANSWERS + "a_completion_of_several_prompts",
    ),
    "order of a stream": (EVENTS + "a_chat_stream", EVENTS + "every_choice_has_one_first_and_one_last_event"),
    "usage comes last": (EVENTS + "a_chat_stream_with_usage", SHAPES + "streams"),
    "streams of completions": (EVENTS + "a_completion_stream",),
    "framing and headers of a stream": (ANSWERS + "a_chat_stream",),
    "tool calls are absent where there are none": (SHAPES + "whole_answers", SHAPES + "streams"),
    "one id and one moment in all chunks": (EVENTS + "a_chat_stream", OFFICIAL + "a_chat_stream"),
    "a stream's headers do not wait for its first token": (
        "integration/test_fields.py::test_sse_keep_alive_interval",
    ),
    "errors before a stream are real ones": (REFUSALS + "errors_of_the_tokenizer_are_real_errors",),
    "an error in the middle of a stream": (
        EVENTS + "an_error_in_the_middle_is_an_event_and_then_done",
        LIFE + "a_failure_in_the_middle",
    ),
    # Text
    "deltas add up to the whole": (
        ANSWERS + "a_stream_adds_up_to_the_whole",
        EVENTS + "any_replay_gives_the_same_text",
    ),
    "no half characters": (TEXTS + "fx2_characters_of_several_tokens",),
    "invalid bytes flow": (
        STREAM + "known_invalid_bytes_come_out_at_once",
        TEXTS + "fx3_costs_the_same_for_every_token",
    ),
    "the end inside a character": (STREAM + "an_incomplete_character_at_the_end_is_dropped",),
    "the prompt is not shown again": (STREAM + "a_prompt_that_ends_inside_a_character_is_not_shown_again",),
    "spaces and bytes of SentencePiece": ("unit/test_text_codec.py::test_sentencepiece_bytes_and_spaces",),
    "control tokens in content": (TEMPLATES + "a_message_cannot_write_control_tokens",),
    "stop strings: earliest, cut, held": (
        "property/test_text_stops.py::test_matches_cuts_and_holds_by_definition",
        STREAM + "what_was_held_comes_out_at_the_end",
        TEXTS + "a_stop_string_inside_one_token",
    ),
    "all end ids": ("unit/test_checkpoint.py::test_end_ids_are_the_union_of_all_three_files",),
    "a stop string may spell a special token": (STREAM + "a_stop_string_may_spell_a_hidden_special_token",),
    "stop strings are not looked for in prompts": (STREAM + "a_stop_string_never_matches_the_prompt",),
    "min_tokens and stop strings": (STREAM + "stop_strings_wait_for_min_tokens",),
    # Errors, headers, the life of a server
    "bad JSON, types and ranges": (REFUSALS + "bad_bodies", FIELDS + "values_that_are_refused"),
    "a prompt that is too long": (
        "integration/test_context_length.py::test_a_prompt_without_room_for_an_answer_is_refused",
    ),
    "unknown path, wrong method": (
        REFUSALS + "unknown_paths_and_methods",
        SHAPES + "a_wrong_method_is_told_the_right_ones",
    ),
    "what is not served is refused by name": (
        SCHEMAS + "what_would_change_the_answer_is_refused_by_name",
        SCHEMAS + "completions_refuse_too",
    ),
    "what is no request": (
        REFUSALS + "what_is_no_request_is_refused_in_the_same_shape",
        "unit/test_api_protocol.py::test_a_refusal_is_never_put_into_the_answer_to_another",
    ),
    "an idempotency key for something else": (
        "integration/test_coming_back.py::test_the_same_answer_to_the_byte",
    ),
    "a body that is too large": (REFUSALS + "a_body_that_is_too_large_and_does_not_say_so",),
    "another content type": (REFUSALS + "every_endpoint_refuses_alike",),
    "a full queue": ("integration/test_limits.py::test_a_full_queue_is_429",),
    "overload, draining": (
        "integration/test_limits.py::test_too_long_in_the_queue_is_503",
        REFUSALS + "a_role_without_a_worker",
    ),
    "a deadline": ("integration/test_limits.py::test_a_deadline_is_504",),
    "workers that crash on a request": ("integration/test_poison.py::test_only_the_poison_ends",),
    "faults say nothing of the inside": ("unit/test_api_errors.py::test_a_fault_of_ours_has_the_same_shape",),
    "surrogates, NaN, nesting": (
        REFUSALS + "bad_bodies",
        "integration/test_fuzz.py::test_nothing_that_is_sent_harms_the_server_or_a_neighbour",
    ),
    "x-request-id on every answer": (ANSWERS + "every_answer_has_a_request_id",),
    "openai-processing-ms on every answer": (ANSWERS + "every_answer_has_a_request_id",),
    "retry-after, x-should-retry": (
        "unit/test_api_errors.py::test_retry_after_is_whole_seconds",
        "integration/test_limits.py::test_the_official_client_does_not_try_a_deadline_again",
    ),
    "Idempotency-Key": ("integration/test_coming_back.py::test_a_key_is_used_again_on_another_replica",),
    "/health, /ready": (ANSWERS + "probes", REFUSALS + "redis_goes_and_comes_back"),
    "SIGTERM": (LIFE + "a_shutdown_finishes_what_runs", LIFE + "a_shutdown_cuts_off_what_does_not_end"),
    "SIGTERM of workers": (
        "integration/test_killed_workers.py::test_a_process_is_told_to_stop_in_the_middle",
        "integration/test_handing_over.py::test_a_scheduler_that_stops_hands_over_to_its_peer_at_once",
    ),
    "idle connections outlive load balancers": (
        "unit/test_rows.py::test_idle_connections_outlive_those_of_load_balancers",
    ),
    "a client that leaves": (
        "integration/test_clients_gone.py::test_a_client_leaves",
        LIFE + "a_client_that_leaves",
    ),
    "a slow reader": (
        LIFE + "a_slow_reader_gets_everything",
        "integration/test_slow_readers.py::test_a_reader_that_stays_behind_is_cut_off",
    ),
    "limits of lists and depths": (REFUSALS + "bad_bodies", SCHEMAS + "choices_are_bounded"),
    # Endpoints
    "GET /v1/models": (ANSWERS + "models", OFFICIAL + "models"),
    "GET /v1/models/{id}": (ANSWERS + "models",),
    "GET /version, /ping": (ANSWERS + "the_version", "integration/test_fields.py::test_ping"),
    "POST /tokenize, /detokenize": (ANSWERS + "tokenize_and_detokenize",),
    "requests by id: read, go on, cancel": (
        "integration/test_coming_back.py::test_the_status_of_a_request",
        "integration/test_coming_back.py::test_a_request_is_cancelled_by_its_id",
    ),
    # Logprobs and echoes
    "logprobs, top_logprobs": (
        "integration/test_logprobs.py::test_a_chat_with_the_official_client",
        "unit/test_api_logprobs.py::test_a_chat_stream",
        "unit/test_logprobs.py::test_the_definition",
    ),
    "logprobs of completions, 0 included": (
        "integration/test_logprobs.py::test_a_prompt_is_scored",
        "unit/test_api_logprobs.py::test_a_completion_stream_with_its_prompt",
    ),
    "echo": (
        "integration/test_logprobs.py::test_a_likelihood_as_lm_eval_asks_for_it",
        "unit/test_api_logprobs.py::test_an_echo_without_logprobs",
    ),
    "max_tokens 0 with echo": ("unit/test_api_logprobs.py::test_an_echo_of_which_nothing_is_generated",),
    "logprobs are finite in JSON": ("unit/test_text_logprobs.py::test_json_can_hold_every_logprob",),
    "bytes of a token, names of partial ones": (
        "integration/test_logprobs.py::test_tokens_that_are_no_text_are_named_by_their_bytes",
        "unit/test_api_logprobs.py::test_two_tokens_with_one_text",
    ),
    "every token has one entry": (
        "property/test_logprobs.py::test_each_row_comes_once_and_with_its_text",
        "unit/test_api_logprobs.py::test_a_row_waits_for_its_character",
    ),
    "a stop string cuts logprobs too": (
        "unit/test_api_logprobs.py::test_a_stop_string_cuts_rows_with_their_text",
    ),
    "text_offset": ("unit/test_text_logprobs.py::test_places_count_code_points",),
    "logprobs are of the raw distribution": (
        "unit/test_logprobs.py::test_the_sampler_changes_nothing_of_it",
    ),
    # Small fields
    "separate_reasoning, include_reasoning": (
        "integration/test_fields.py::test_separate_reasoning_and_include_reasoning",
        "unit/test_api_reasoning.py::test_what_is_reasoning",
    ),
    "reasoning_content": ("integration/test_fields.py::test_reasoning_content",),
    "request_id, rid": ("unit/test_api_client_fields.py::test_request_id_and_rid_are_labels",),
    "cache_salt": (
        "integration/test_fields_on_a_model.py::test_cache_salt_keeps_prompts_apart",
        "unit/test_api_client_fields.py::test_cache_salt_never_joins_two_tenants",
    ),
    "priority": ("unit/test_api_client_fields.py::test_priority",),
    "truncate_prompt_tokens": ("integration/test_fields_on_a_model.py::test_truncate_prompt_tokens",),
    "strict fields": ("integration/test_fields.py::test_strict_fields",),
    "comments keep a silent stream alive": (
        "integration/test_fields.py::test_sse_keep_alive_interval",
        "integration/test_fields.py::test_sse_keep_alive_does_not_disturb_a_client",
    ),
    "POST /abort_request": ("integration/test_fields.py::test_abort_request",),
    "the model's own sampling defaults": (
        "unit/test_sampling_defaults.py::test_generation_config_auto_is_the_models",
    ),
    "n with temperature 0": (
        "integration/test_fields_on_a_model.py::test_n_with_temperature_0_gives_equal_choices",
    ),
    # Access
    "no key, a wrong key": (
        "integration/test_access.py::test_a_refusal_says_what_is_missing",
        "integration/test_access.py::test_no_path_gets_around_the_key",
        "unit/test_auth.py::test_forms_of_a_key",
    ),
    "keys of settings, a file and Redis": (
        "unit/test_auth.py::test_keys_from_settings_and_from_redis",
        "integration/test_access.py::test_a_file_of_keys",
        "integration/test_access.py::test_the_life_of_a_key_on_all_replicas",
    ),
    "a body is not read from strangers": (
        "integration/test_access.py::test_a_body_is_not_read_from_strangers",
    ),
    "keys while Redis is away": (
        "integration/test_access.py::test_a_redis_that_goes_opens_nothing_and_locks_out_nobody",
        "integration/test_access.py::test_a_server_that_cannot_read_the_keys_is_closed",
    ),
    "tenants do not see each other's requests": (
        "integration/test_tenants.py::test_another_tenants_request_does_not_exist",
        "integration/test_tenants.py::test_another_tenants_request_cannot_be_cancelled",
        "integration/test_tenants.py::test_an_idempotency_key_is_its_tenants_own",
    ),
    "a key that may not": ("integration/test_access.py::test_a_key_for_one_model_only",),
    "what is public": (
        "integration/test_access.py::test_the_public_list_is_open",
        "unit/test_auth.py::test_the_public_list",
    ),
    "a tenant's limits": (
        "integration/test_rate_limits.py::test_requests_per_minute_on_all_replicas",
        "integration/test_rate_limits.py::test_the_sdk_reads_it",
    ),
    "CORS": (
        "integration/test_browsers.py::test_a_browser_may_ask_for_permission_without_a_key",
        "integration/test_browsers.py::test_other_origins_get_no_permission",
    ),
    "no secrets in logs": (
        "integration/test_access_log.py::test_the_log_has_no_secrets",
        "unit/test_settings.py::test_a_secret_that_is_refused_is_not_shown",
    ),
    "499 in logs": ("integration/test_access_log.py::test_a_line_for_each_request",),
    "HTTPS": ("integration/test_https.py::test_a_whole_server",),
}


@functools.cache
def _names_in(file: str) -> frozenset[str]:
    """The names of the tests in a file."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_its_tests(row: str) -> None:
    assert ROWS[row]
    for name in ROWS[row]:
        file, _, test = name.partition("::")
        assert test in _names_in(file), f"{name} is gone"


def test_idle_connections_outlive_those_of_load_balancers() -> None:
    from api import server

    assert server._KEEP_ALIVE_S > 75
