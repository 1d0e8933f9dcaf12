"""The promises of docs/security.md, and the tests that hold them."""

from __future__ import annotations

GUARD = "server/test_guard.py"
ACCESS = "server/test_access.py"
RULES = "server/test_access_rules.py"
HTTP = "server/test_http_limits.py"
DASHBOARD = "server/dashboard/test_dashboard_access.py"
DATA = "server/dashboard/test_dashboard_data.py"
PAGE = "server/dashboard/test_dashboard_page.py"
HEADS = "server/test_public_prompts.py"
MODELS = "server/test_models.py"
WRONG_KEYS = "server/test_wrong_keys.py"
TENANTS = "property/test_tenants.py"
BODIES = "server/test_hostile_bodies.py"
SPECIAL = "text/test_special_tokens.py"
ADAPTERS = "runtime/test_adapter_files.py"
SESSIONS = "server/test_browser_sessions.py"
LOG = "server/test_request_log.py"
HINTS = "cache/test_hints.py"
RESPONSES = "server/responses/test_store.py"
GRAMMARS = "text/constraints/test_grammar_host.py"
CLEARING = "engine/test_clearing_tenants.py"

# Words of the page, and the tests: each promise is a sentence, or the part of one that a test can hold.
PROMISES: dict[str, tuple[str, ...]] = {
    # ---- several servers
    "a record without the code that the": (
        "tiers/remote/test_remote_tier.py::test_a_record_of_somebody_without_the_secret_is_a_miss",
        "faults/test_shared_faults.py::test_a_fault_changes_no_answer",
    ),
    "The server learns no": ("engine/tiers/test_shared_tier.py::test_the_server_learns_no_salt",),
    "salt never leaves it": (
        "engine/kv_events/test_wire.py::test_a_salt_never_leaves_in_clear_and_tells_tenants_apart",
    ),
    # ---- tenants
    "never across two: in memory, in RAM below an accelerator, on disk, for drafts, and for cached tokens of texts": (
        f"{TENANTS}::test_answers_to_a_tenant_do_not_depend_on_the_other",
        f"{TENANTS}::test_no_route_depends_on_the_requests_of_the_other_tenant",
        f"{TENANTS}::test_the_comparison_notices_tenants_that_share_a_namespace",
    ),
    "so no `cache_salt` leads into another tenant's salt": (
        f"{ACCESS}::test_each_pair_of_tenant_and_salt_has_a_hash_of_its_own",
    ),
    "each may have 1,024 characters": (f"{ACCESS}::test_a_too_long_salt_is_refused_with_the_limit",),
    "A request with two of them is refused": (f"{ACCESS}::test_a_repeated_salt_header_is_refused",),
    "The tenant of a key overrides the header": (f"{ACCESS}::test_the_tenant_of_a_key_overrides_the_header",),
    "is a key that is bound to no tenant and may name any": (
        f"{ACCESS}::test_a_key_without_a_tenant_may_name_any",
    ),
    "With a file, every request needs a key": (f"{RULES}::test_roles_decide_what_a_key_may_do",),
    "Limits are a tenant's, over all of its keys": (
        "server/test_rate_limits.py::test_a_limit_is_exact_with_many_threads",
        f"{RULES}::test_retained_bytes_reach_the_cache_and_change_with_the_file",
    ),
    "lists these names alone": (
        f"{RULES}::test_a_tenant_uses_the_models_of_its_list_only",
        f"{MODELS}::test_a_tenant_sees_only_the_models_that_it_may_use",
    ),
    "so that a bucket may owe some, which the tenant's next requests wait for": (
        "server/test_rate_limits.py::test_answers_may_owe_tokens_that_the_next_request_waits_for",
        "server/test_rate_limits.py::test_the_tokens_of_answers_count_as_they_come",
    ),
    "the use of 10,000 is remembered": (
        "server/test_rate_limits.py::test_idle_tenants_are_forgotten_and_busy_ones_are_not",
    ),
    "A key that is removed is refused at once": (
        f"{RULES}::test_a_changed_file_is_used_at_once_and_a_broken_one_is_not",
        f"{WRONG_KEYS}::test_a_key_that_is_removed_from_the_file_is_a_wrong_one",
    ),
    "the dashboard's feed ends": (f"{DASHBOARD}::test_a_feed_ends_when_its_key_is_taken_away",),
    "No message shows a key": (
        f"{RULES}::test_a_wrong_value_is_named_by_its_place_and_not_shown",
        f"{ACCESS}::test_invalid_keys_are_refused_at_the_start_and_not_shown",
        f"{SESSIONS}::test_nothing_secret_is_shown",
    ),
    # ---- public heads
    "A prompt of any API that begins with exactly these tokens shares the K/V up to there": (
        f"{HEADS}::test_every_api_shares_the_same_heads",
    ),
    "The rest stays its tenant's: in memory, on disk, for drafts, and in the time of answers": (
        f"{HEADS}::test_tenants_share_listed_prompts_and_nothing_that_follows",
        f"{HEADS}::test_no_route_tells_whether_another_tenant_has_used_a_text",
    ),
    "and so is one with a `cache_salt`": (
        f"{HEADS}::test_a_salt_of_the_client_keeps_all_of_its_prompt_private",
    ),
    "Only the operator clears heads": (f"{HEADS}::test_only_the_operator_clears_heads",),
    # ---- rights
    "A key of the role `operator` is an admin key": (f"{RULES}::test_roles_decide_what_a_key_may_do",),
    "each sender that has the key and names no tenant is the operator": (
        f"{ACCESS}::test_stats_explain_and_clearing_everything_require_the_admin_key",
        f"{ACCESS}::test_a_sender_that_names_a_tenant_gets_no_information_about_all",
        "server/test_errors.py::test_every_route_but_health_requires_the_api_key",
    ),
    "removes the prefixes cached under exactly that salt": (
        f"{ACCESS}::test_a_tenant_clears_its_own_salt_only",
        f"{CLEARING}::test_clearing_one_tenant_keeps_others_in_memory_and_on_disk",
        f"{MODELS}::test_a_tenant_clears_its_salt_on_the_disk_of_an_unloaded_model",
    ),
    "of all models or of the one that it names": (
        f"{MODELS}::test_the_disk_of_an_unloaded_model_is_cleared",
        f"{MODELS}::test_a_salt_of_a_model_that_was_not_loaded_yet_is_cleared_when_it_is_loaded",
        f"{MODELS}::test_a_model_that_is_unloaded_meanwhile_is_cleared_and_so_are_those_after_it",
    ),
    "Where the disk fails, the answer is an error, never a success": (
        f"{CLEARING}::test_a_disk_that_fails_is_told_and_memory_is_cleared",
        f"{CLEARING}::test_a_directory_that_could_not_be_opened_is_told",
        f"{MODELS}::test_one_model_that_cannot_be_cleared_is_told_and_the_others_are_cleared",
    ),
    "A field that a state route does not know is refused": (
        "server/test_prompt_bodies.py::test_every_state_route_refuses_each_misspelled_field",
        "server/test_prompt_bodies.py::test_a_wrong_body_clears_nothing",
    ),
    "and parameters of the query that they do not have": (
        "server/test_prompt_bodies.py::test_every_state_route_refuses_parameters_that_it_does_not_have",
    ),
    "Across salts no answer has a token, a text or a count of another": (
        f"{TENANTS}::test_no_route_depends_on_the_requests_of_the_other_tenant",
        f"{TENANTS}::test_every_route_of_the_application_is_asked",
    ),
    "see labels of tenants in `/metrics`": (
        f"{RULES}::test_a_key_for_metrics_sees_tenants_there_and_is_unknown_elsewhere",
        "server/test_tenant_labels.py::test_a_tenant_of_a_key_is_shown_and_one_that_a_header_names_is_hashed",
    ),
    "`explain` shows no more than that": (
        f"{ACCESS}::test_explain_does_not_reveal_other_clients_texts",
        "server/test_openai_api.py::test_explain_names_the_divergence_in_tokens_and_in_text",
    ),
    "which leaves `explain` to the operator": (
        "server/test_explainer.py::test_explanations_require_the_admin_key_if_there_is_one",
    ),
    "its position and numbers of tokens, and no text": (
        "server/test_cache_diagnostics.py::test_a_span_that_changes_is_a_cause_and_its_text_stays_on_the_server",
        "server/test_cache_diagnostics.py::test_other_tenants_answers_and_prefixes_do_not_count",
    ),
    "name its kind and nothing of its text": (
        "test_error_texts.py::test_no_error_shows_values_as_python_writes_them",
    ),
    # ---- HTTP
    "All errors have the API's shape": (
        f"{HTTP}::test_a_head_that_is_not_http_is_refused_and_the_connection_closed",
    ),
    "16 MiB (`--max-body`)": (f"{GUARD}::test_a_body_over_the_limit_is_refused_before_it_is_read",),
    "bodies of all requests that are received or answered": (
        f"{GUARD}::test_the_bodies_of_all_requests_together_are_bounded_and_given_back",
    ),
    "embeddings of all requests to a model": (
        "server/test_embeddings.py::test_answers_that_clients_do_not_read_are_bounded",
    ),
    "2,048 (`--max-connections`)": (
        f"{HTTP}::test_connections_over_the_limit_get_503_until_one_is_closed",
        f"{HTTP}::test_connections_far_over_the_limit_are_reset",
        f"{GUARD}::test_the_limit_of_open_files_is_raised_for_connections_or_limits_them",
    ),
    "| 100, together 64 KiB |": (f"{HTTP}::test_urls_and_heads_beyond_the_bounds_are_refused",),
    "chunk extensions and trailers between two parts of a body": (
        f"{HTTP}::test_chunk_extensions_and_trailers_are_bounded",
        f"{HTTP}::test_a_body_of_very_many_tiny_chunks_is_refused",
    ),
    "requests that wait for an earlier answer on their connection": (
        f"{HTTP}::test_pipelined_requests_beyond_the_limit_are_dropped",
    ),
    "head of a request, from its first byte": (
        f"{HTTP}::test_a_head_that_arrives_byte_by_byte_times_out",
        f"{HTTP}::test_a_header_without_an_end_is_refused_while_it_arrives",
    ),
    "each 30 s of a body": (f"{HTTP}::test_a_body_that_stops_or_drips_times_out",),
    "whole body | 1 hour": (
        f"{HTTP}::test_a_large_body_over_a_slow_line_is_answered_within_the_bound_on_its_time",
    ),
    "rest of a body that was refused": (
        f"{HTTP}::test_the_rest_of_a_refused_body_is_discarded_for_a_limited_time",
    ),
    "idle connection | 75 s": (
        f"{HTTP}::test_an_idle_connection_is_kept_longer_than_clients_and_proxies_keep_it",
    ),
    "answer of which the client takes nothing": (
        f"{HTTP}::test_a_stream_that_is_not_read_times_out_and_its_requests_are_aborted",
        f"{HTTP}::test_a_whole_answer_that_is_not_read_times_out",
    ),
    "Trailers are dropped: they never count as headers": (
        f"{HTTP}::test_a_trailer_does_not_count_as_a_header",
    ),
    "An error in a request never appears within the answer to an earlier request": (
        f"{HTTP}::test_malformed_bytes_after_a_request_do_not_break_its_answer",
    ),
    # ---- web pages
    "anything else gets 415": (f"{GUARD}::test_a_body_of_another_content_type_is_refused",),
    "it needs JSON": (f"{GUARD}::test_clear_needs_no_body_and_refuses_a_form",),
    "A request with an `Origin` that is not the server's own gets 403": (
        f"{GUARD}::test_a_page_of_another_origin_can_neither_read_nor_change_anything",
    ),
    "also a GET, such as an image, a script, a frame or a stream of events": (
        f"{GUARD}::test_a_page_of_another_site_loads_nothing_but_by_a_link",
    ),
    "no page of another site takes the place of a viewer": (
        f"{GUARD}::test_a_link_on_another_site_opens_no_data_of_the_dashboard",
        f"{GUARD}::test_event_streams_of_a_foreign_page_take_no_place_of_a_viewer",
    ),
    "a page behind a proxy that renames the host is one of the server's own": (
        f"{GUARD}::test_requests_of_the_servers_own_page_and_of_a_users_navigation_are_answered",
    ),
    "lets pages of these origins in and answers their preflights": (
        f"{GUARD}::test_a_page_of_an_allowed_origin_gets_cors_headers",
    ),
    "or if requests need no key, the server answers only to `localhost`": (
        f"{GUARD}::test_a_server_on_loopback_accepts_only_its_local_names",
        f"{GUARD}::test_any_host_name_is_accepted_only_where_a_key_is_needed_beyond_loopback",
    ),
    "adds names: for a proxy": (f"{GUARD}::test_an_option_allows_further_host_names",),
    "With a key, on other addresses, every name is accepted": (
        f"{GUARD}::test_any_host_name_is_accepted_only_where_a_key_is_needed_beyond_loopback",
        f"{GUARD}::test_a_server_with_a_file_of_keys_accepts_any_host_name",
    ),
    "Without `--allowed-origins` no answer has CORS headers": (
        f"{GUARD}::test_answers_have_no_cors_headers_without_the_option",
    ),
    "Every answer, an error of the connection itself included": (
        f"{GUARD}::test_every_answer_keeps_browsers_from_guessing_its_type_and_other_origins_from_loading_it",
    ),
    "A request with different keys in the two headers is refused": (
        f"{GUARD}::test_two_headers_with_different_keys_are_refused",
    ),
    "HEAD is answered as GET, without a body": (f"{GUARD}::test_head_is_get_without_a_body",),
    # ---- wrong keys
    "A right key always passes at once": (
        f"{WRONG_KEYS}::test_a_right_key_passes_at_once_beside_one_who_guesses",
    ),
    "on every route that would tell a wrong key from a right one": (
        f"{WRONG_KEYS}::test_no_route_that_shows_whether_a_key_is_right_answers_guesses_at_once",
    ),
    "An address has one free wrong key more every 10 seconds": (
        f"{WRONG_KEYS}::test_an_address_may_guess_again_after_a_while",
        f"{WRONG_KEYS}::test_the_addresses_of_one_ipv6_network_are_one",
    ),
    "The server remembers 1,024 addresses, and holds 256 answers back at once": (
        f"{WRONG_KEYS}::test_memory_and_held_answers_are_bounded",
    ),
    # ---- the dashboard
    "Its scripts and its style come from files alone, and it cannot be framed": (
        f"{PAGE}::test_the_page_may_run_its_own_files_only",
        f"{PAGE}::test_the_page_loads_only_files_that_exist_and_has_no_inline_script",
    ),
    "The cookie of its session is HttpOnly and SameSite=Strict": (
        f"{DASHBOARD}::test_a_key_opens_a_session_that_only_a_cookie_names",
        f"{DASHBOARD}::test_the_cookie_of_a_page_over_https_is_secure",
    ),
    "must carry the session's CSRF token": (f"{DASHBOARD}::test_a_change_needs_the_sessions_token",),
    "There are 256 sessions at most, 16 of one key, and each ends after 12 hours": (
        f"{SESSIONS}::test_the_number_of_sessions_is_bounded",
        f"{SESSIONS}::test_a_session_ends_after_its_time",
    ),
    "While the server drains, the dashboard's routes still accept POST": (
        f"{DASHBOARD}::test_requests_are_stopped_and_sessions_end_while_the_server_drains",
    ),
    "A tenant's page shows the tenant's own namespace": (
        f"{DASHBOARD}::test_a_tenant_sees_its_own_prefixes_alone",
        f"{DASHBOARD}::test_a_tenants_feed_tells_nothing_of_others",
    ),
    "Token ids and texts need a key that is bound to the tenant": (
        f"{DASHBOARD}::test_a_header_that_names_a_tenant_shows_none_of_its_tokens",
        f"{DASHBOARD}::test_tokens_of_a_named_tenant_are_shown_where_the_server_explains_all",
    ),
    "may not use the routes below `/dashboard`": (
        f"{DASHBOARD}::test_pages_of_allowed_origins_use_the_api_and_not_the_dashboard",
    ),
    "watch one model at a time, 8 of them of one tenant": (
        f"{DATA}::test_the_number_of_pages_is_bounded",
        f"{DATA}::test_a_tenant_leaves_room_for_the_pages_of_others",
    ),
    # ---- limits of a request
    "A value beyond a limit is answered with status 400": (
        "server/test_hostile_requests.py::test_every_field_of_every_route_is_answered_with_hostile_values",
        "server/test_hostile_requests.py::test_a_hostile_value_anywhere_in_a_body_is_answered",
    ),
    "The system ends such a process after 2 s of a processor": (
        f"{GRAMMARS}::test_a_compile_without_end_is_ended",
        f"{GRAMMARS}::test_a_chain_that_overflows_the_stack_is_an_error_of_its_grammar",
        "server/test_hostile_schemas.py::test_what_ended_a_server_once_is_an_error",
    ),
    "or ends the requests with that grammar while their answers are generated": (
        f"{GRAMMARS}::test_the_end_of_a_process_fails_its_answers_alone",
    ),
    "Compiles take turns, in which short ones come first": (
        f"{GRAMMARS}::test_a_compile_that_has_used_less_comes_first_and_the_smaller_of_new_ones",
    ),
    "At most four long ones are open at once, two of one tenant": (
        f"{GRAMMARS}::test_a_tenant_has_few_long_compiles_at_once_and_leaves_room_for_others",
    ),
    "A compile ends when its client leaves": (f"{GRAMMARS}::test_a_client_that_leaves_ends_its_compile",),
    "Compiled grammars are kept for each salt apart": (
        "text/constraints/test_constraint_compiler.py::test_a_grammar_is_compiled_once_for_each_salt",
    ),
    "References out of a schema are refused": (
        "server/test_hostile_schemas.py::test_a_hostile_schema_is_an_error_that_says_why",
    ),
    "The text of a prompt is bounded before it is tokenized": (
        f"{BODIES}::test_a_text_that_cannot_fit_is_refused_without_being_tokenized",
    ),
    "are rendered and tokenized one after another": (
        f"{BODIES}::test_long_bodies_are_prepared_one_after_another_and_short_ones_overtake_them",
        f"{BODIES}::test_no_more_requests_wait_than_the_engine_would_queue",
    ),
    "is checked before it is parsed": (
        f"{BODIES}::test_the_shape_of_a_body_is_found_without_parsing_it",
        f"{BODIES}::test_a_body_with_deep_or_too_many_values_is_refused",
    ),
    "no message can end its turn or open another one": (
        f"{SPECIAL}::test_an_escaped_text_has_no_control_token_beside_any_other_text",
        f"{SPECIAL}::test_unflagged_tokens_of_turns_are_text_in_messages",
        f"{BODIES}::test_special_tokens_in_messages_are_control_tokens_only_by_the_operators_option",
    ),
    "refuses the message with `special_token_in_text`": (
        f"{SPECIAL}::test_a_tokenizer_that_cannot_be_copied_refuses_special_tokens_in_text",
    ),
    "refuses text that spells out a token only after": (
        f"{SPECIAL}::test_a_text_from_which_the_template_removes_a_part_cannot_become_a_control_token",
        f"{SPECIAL}::test_other_characters_that_normalize_to_a_special_token_are_refused",
    ),
    # ---- disk files
    "Files are readable by their owner only (0600)": (
        "tiers/disk/test_tier.py::test_files_are_readable_by_their_owner_only",
    ),
    "made readable by their owner only, also where they existed before": (
        f"{RESPONSES}::test_all_files_are_private_also_those_that_exist",
    ),
    "leaves no text in them": (
        f"{RESPONSES}::test_no_trace_of_a_deleted_response_stays_in_any_file",
        f"{RESPONSES}::test_no_trace_of_an_evicted_response_stays_in_any_file",
    ),
    "A damaged file never gives another response's content": (
        f"{RESPONSES}::test_no_flipped_bit_stops_the_start_or_gives_other_content",
        f"{RESPONSES}::test_pages_in_each_others_place_give_no_other_content",
        f"{RESPONSES}::test_changed_rows_are_damage",
        f"{RESPONSES}::test_a_file_that_is_damaged_while_it_is_used_is_set_aside_at_once",
    ),
    "A tenant reads, continues and deletes its own responses alone": (
        "server/responses/test_responses_api.py::test_tenants_do_not_see_each_others_responses",
        f"{RESPONSES}::test_other_tenants_see_nothing",
        f"{TENANTS}::test_the_stored_responses_of_the_other_tenant_are_out_of_reach",
    ),
    "A damaged, foreign or swapped record is a miss": (
        "faults/test_damage.py::test_another_identity_is_a_miss_of_the_kind_of_the_difference",
        "faults/test_damage.py::test_a_damaged_index_never_returns_wrong_bytes",
        "faults/test_disk_faults.py::test_a_fault_is_counted_by_kind_and_no_request_fails_or_gets_wrong_tokens",
    ),
    # ---- models and adapters
    "never from pickles": (
        f"{ADAPTERS}::test_a_pickle_is_refused_and_not_read",
        f"{ADAPTERS}::test_a_pickle_beside_the_weights_is_not_read",
    ),
    "are bounded before any is read": (
        f"{ADAPTERS}::test_an_absurd_rank_is_refused",
        f"{ADAPTERS}::test_a_header_that_promises_too_much",
        "runtime/torch/adapters/test_mixed_adapters.py::"
        "test_a_tensor_of_an_absurd_shape_is_refused_before_it_is_read",
    ),
    "operators load adapters from the directories of `--adapter-directory` alone": (
        "server/test_adapters_over_http.py::test_adapters_come_from_allowed_directories_only",
        "server/test_adapters_over_http.py::test_clients_load_no_adapters",
        f"{ADAPTERS}::test_a_directory_is_allowed_by_its_real_path",
    ),
    "no more wait than the queue holds": (f"{MODELS}::test_only_so_many_requests_wait_for_loads",),
    "A loaded model stays until all requests that waited for it have ended": (
        f"{MODELS}::test_a_model_is_not_unloaded_before_those_who_waited_for_it_have_used_it",
    ),
    "A model with `pin` is never unloaded for another one": (
        f"{MODELS}::test_a_client_that_asks_for_models_in_turn_takes_no_pinned_model_away",
    ),
    "is not tried again for 30 s": (
        f"{MODELS}::test_a_failed_load_fails_its_requests_and_is_not_tried_for_each",
    ),
    # ---- hints
    "divide the retainable memory among them, requests without hints count as one more tenant": (
        f"{HINTS}::test_active_tenants_divide_the_share",
        f"{HINTS}::test_requests_without_hints_count_as_one_more_tenant",
        f"{HINTS}::test_the_rest_of_a_tenant_whose_share_is_full_goes_before_the_prefixes_of_others",
        "cache/test_pins.py::test_active_tenants_divide_what_can_be_pinned",
    ),
    "displaces no prefix of another one within its share": (
        f"{HINTS}::test_tenants_whose_every_request_has_hints_do_not_starve_one_without",
    ),
    "a pin, its refusal and its release are answered alike": (
        f"{HEADS}::test_no_route_tells_whether_another_tenant_has_used_a_text",
        "cache/test_pins.py::test_all_pins_together_are_bounded_and_the_reason_tells_nothing_of_others",
        "server/hints/test_routes.py::test_a_tenant_sees_and_releases_its_own_pins_only",
    ),
    # ---- logs
    "Logs and traces hold no prompts, answers or keys": (
        f"{LOG}::test_the_line_of_a_request_has_route_status_tokens_and_times_and_no_text",
        "server/test_tracing.py::test_a_request_is_a_span_with_its_numbers_and_a_span_for_each_phase",
    ),
    "A client cannot write a log line of its own": (
        "test_logs.py::test_text_of_clients_cannot_write_a_line_of_its_own",
        f"{LOG}::test_a_sane_id_of_the_client_is_kept_and_any_other_is_replaced",
    ),
}
