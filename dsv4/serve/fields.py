"""The rule for fields, as a table: what clients send beside the fields that have an effect.

A null passes anywhere. A field of the table passes at the values that ask for nothing here; at others it is
refused by name. What is neither in the table nor in `schema` is unknown.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple


class _Any:
    """Every value: nothing here depends on it."""


ANY = _Any()


class SameAs(NamedTuple):
    """The value of another field of the same object, or what that one is by default."""

    field: str
    default: Any


class Row(NamedTuple):
    types: str  # of `schema`, `anthropic` and `responses`; also of what is derived from them
    fields: str
    nothing: Any  # ANY, SameAs, or a tuple of values; none: null alone
    sent_by: str

    def passes(self, value: Any, beside: Mapping[str, Any]) -> bool:
        if self.nothing is ANY:
            return True
        if isinstance(self.nothing, SameAs):
            other = beside.get(self.nothing.field)
            return bool(value == (self.nothing.default if other is None else other))
        return any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.nothing
        )

    @property
    def expected(self) -> str:
        if isinstance(self.nothing, SameAs):
            return f"expected the value of {self.nothing.field}"
        known = " or ".join(json.dumps(value) for value in self.nothing)
        return f"expected {known}" if known else "leave it out"


ROWS = (
    # Bodies: whose they are, how they are billed, kept and routed.
    Row("Body", "user metadata safety_identifier service_tier", ANY, "OpenAI"),
    Row("Body", "store prompt_cache_key prompt_cache_retention verbosity", ANY, "OpenAI"),
    Row("Body", "request_id media_io_kwargs mm_processor_kwargs truncation_side", ANY, "vLLM"),
    Row("Body", "guided_decoding_backend", ANY, "vLLM, before 0.12"),
    Row("Body", "rid", ANY, "SGLang"),
    Row("ResponsesBody", "client_metadata", ANY, "Codex"),
    Row("ResponsesBody", "metadata user safety_identifier prompt_cache_key service_tier", ANY, "OpenAI"),
    Row("ResponsesBody", "prompt_cache_retention max_tool_calls", ANY, "OpenAI"),
    Row("ResponsesBody", "request_id", ANY, "vLLM"),
    Row("Body ResponsesBody", "prompt_cache_options", ANY, "OpenAI"),
    Row("CountBody", "cache_control metadata service_tier inference_geo", ANY, "Anthropic, Claude Code"),
    Row("CountBody", "diagnostics user_profile_id workspace_id billing_policy", ANY, "Anthropic"),
    # Values that ask for what happens anyway.
    Row("Body", "best_of", SameAs("n", 1), "LangChain"),
    Row("Body", "suffix", ("",), "OpenAI's completions"),
    Row("Body", "modalities", (["text"],), "OpenAI"),
    Row("Body", "audio prediction web_search_options function_call moderation", (), "OpenAI"),
    Row("Body", "functions", ([],), "OpenAI, before tools"),
    Row("Body", "skip_special_tokens spaces_between_special_tokens", (True,), "vLLM, SGLang"),
    Row("Body", "include_reasoning", (True,), "vLLM"),
    Row("Body", "use_beam_search return_tokens_as_token_ids", (False,), "vLLM"),
    Row("Body", "length_penalty", (1,), "vLLM"),
    Row("Body", "truncate_prompt_tokens", (), "vLLM"),
    Row("Body", "logits_processors", ([],), "vLLM"),
    Row("Body", "kv_transfer_params vllm_xargs", ({},), "vLLM"),
    Row("Body", "priority", (0,), "vLLM"),
    Row("Body", "guided_whitespace_pattern structural_tag", (), "vLLM, before 0.12"),
    Row("ChatBody", "add_generation_prompt", (True,), "vLLM"),
    Row("ChatBody", "echo add_special_tokens", (False,), "vLLM"),
    Row("ChatBody", "chat_template", (), "vLLM"),
    Row("ChatBody", "documents", ([],), "vLLM"),
    Row("CompletionBody", "add_special_tokens", (True,), "vLLM"),
    Row("Body", "separate_reasoning stream_reasoning", (True,), "SGLang"),
    Row("Body", "no_stop_trim return_hidden_states", (False,), "SGLang"),
    Row("Body", "regex ebnf lora_path session_params stop_regex", (), "SGLang"),
    Row("Body", "cache_prompt", (True,), "llama.cpp"),
    Row("Body", "timings_per_token post_sampling_probs", (False,), "llama.cpp"),
    Row("Body", "typical_p tfs_z", (1,), "llama.cpp"),
    Row("Body", "mirostat dynatemp_range dry_multiplier xtc_probability n_keep n_probs", (0,), "llama.cpp"),
    Row("Body", "id_slot", (-1,), "llama.cpp"),
    Row("ResponsesBody", "background", (False,), "OpenAI"),
    Row("ResponsesBody", "truncation", ("disabled",), "OpenAI"),
    Row("ResponsesBody", "conversation prompt context_management moderation", (), "OpenAI"),
    Row("ResponsesBody", "stream_options", ANY, "OpenAI: obfuscation"),
    Row("CountBody", "mcp_servers", ([],), "Anthropic"),
    Row("CountBody", "container fallbacks compaction fallback_credit_token", (), "Anthropic"),
    Row("CountBody", "speed", ("standard",), "Anthropic, Claude Code"),
    # Parts of bodies.
    Row("StreamOptions", "include_obfuscation", ANY, "OpenAI"),
    Row("Thinking", "clear_thinking", (), "GLM's clients"),
    Row("NamedSchema JsonSchema", "description name strict", ANY, "OpenAI: a schema is always kept to"),
    Row("Reasoning", "summary generate_summary", ANY, "OpenAI, Codex: thoughts are given as they are"),
    Row("Reasoning", "context mode", ANY, "OpenAI"),
    Row("TextConfig", "verbosity", ANY, "OpenAI, Codex"),
    Row("OutputConfig", "task_budget", (), "Anthropic"),
    # Tools.
    Row("Tool FlatTool ClientTool", "cache_control eager_input_streaming", ANY, "Anthropic"),
    Row("Tool FlatTool ClientTool", "allowed_callers input_examples output_schema", ANY, "Anthropic, OpenAI"),
    Row("FlatTool", "async", (False,), "OpenAI"),
    Row("FlatTool", "defer_loading", ANY, "Codex: its own tool search finds what is shown already"),
    # Messages. Of those that come back, nothing that is unknown is read.
    Row("Message Turn", "name cache_control", ANY, "OpenAI; Anthropic's by way of proxies"),
    Row("Message Turn", "id metadata created_at", ANY, "chat fronts"),
    Row("Message Turn TextPart", "provider_options provider_specific_fields", ANY, "Vercel AI SDK, LiteLLM"),
    Row("ToolMessage", "is_error tool_name", ANY, "LangChain, Ollama"),
    Row("TextPart", "cache_control annotations citations", ANY, "Anthropic, OpenAI"),
    Row("TextPart", "prompt_cache_breakpoint", ANY, "OpenAI"),
    Row("ToolResultBlock", "cache_control is_error toolset_name", ANY, "Anthropic: the text tells the error"),
)

# Old names, and those of others: type, their path, ours.
ALIASES = (
    ("Body", "guided_json", "structured_outputs.json"),
    ("Body", "guided_regex", "structured_outputs.regex"),
    ("Body", "guided_choice", "structured_outputs.choice"),
    ("Body", "guided_grammar", "structured_outputs.grammar"),
    ("Body", "n_predict", "max_tokens"),
    ("AssistantMessage", "reasoning", "reasoning_content"),
)


def _names(kind: type) -> set[str]:
    return {each.__name__ for each in kind.__mro__}


@cache
def rows(kind: type) -> dict[str, Row]:
    """The rows of a type by field."""
    return {
        field: row for row in ROWS if _names(kind) & set(row.types.split()) for field in row.fields.split()
    }


@cache
def aliases(kind: type) -> dict[str, str]:
    return {theirs: ours for name, theirs, ours in ALIASES if name in _names(kind)}


def described(kind: type) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields of the table as JSON schemas, for the API's description."""
    for field, row in rows(kind).items():
        what = "no effect" if row.nothing is ANY else row.expected
        shown: dict[str, Any] = {"description": f"{what}; sent by {row.sent_by}"}
        is_few = type(row.nothing) is tuple
        yield field, {**shown, "enum": [*row.nothing, None]} if is_few else shown
    for theirs, ours in aliases(kind).items():
        yield theirs, {"description": f"as {ours}"}
