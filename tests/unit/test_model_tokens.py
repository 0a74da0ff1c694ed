"""The prepared bundled model: what it keeps, token by token, and that it talks."""

import hashlib
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_server.cluster.model import (
    ModelUnavailableError,
    Source,
    chat_template,
    is_prepared,
    prepare,
)

Message = dict[str, Any]

# Some are the first to import torch and vLLM, which warn of themselves.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    described = {"name": name, "description": f"To {name}.", "parameters": parameters}
    return {"type": "function", "function": described}


def called(content: str | None, *calls: tuple[str, dict[str, Any]]) -> Message:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ],
    }


def written(message: Message) -> str:
    """What the model wrote for ``message`` to be parsed from it."""
    return (message["content"] or "") + "".join(
        "<tool_call>\n"
        + json.dumps({k: call["function"][k] for k in ("name", "arguments")})
        + "\n</tool_call>"
        for call in message.get("tool_calls", ())
    )


CITY = {"type": "string", "enum": ["Paris", "Rome"]}
TOOLS = [
    tool("find_trains", to=CITY, day={"type": "string", "maxLength": 9}),
    tool("book_train", to=CITY, seats={"type": "integer"}),
    tool("cancel", confirm={"type": "boolean"}),
]
CONVERSATION: list[Message] = [
    {"role": "system", "content": "You plan journeys."},
    {"role": "user", "content": "Two of us want to be in Paris on Friday."},
    called(None, ("find_trains", {"to": "Paris", "day": "friday"})),
    {"role": "tool", "content": '{"trains": [{"id": 9551, "departs": "08:12"}]}'},
    called("Let me book it.\n", ("book_train", {"to": "Paris", "seats": 2})),
    {"role": "tool", "content": "booked: K7QX2\n"},
    {"role": "assistant", "content": "Booked.  Your reference is K7QX2 \n"},
    {"role": "user", "content": "And back, from Rome? Cancel what is not needed."},
    called(
        "", ("find_trains", {"to": "Rome", "day": "1.12."}), ("cancel", {"confirm": 1})
    ),
    {"role": "tool", "content": "none"},
    {"role": "tool", "content": "12 °C, naïve “quotes” 👋"},
    {"role": "assistant", "content": "12 °C — 👋"},
    {"role": "user", "content": "Thanks"},
]
ANSWERS = [i for i, m in enumerate(CONVERSATION) if m["role"] == "assistant"]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The user's own prepared model: made once on a machine."""
    return prepare()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def tokens(tokenizer: Any, messages: list[Message]) -> list[int]:
    """The prompt that asks for the answer to ``messages``."""
    ids: list[int] = tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    return ids


def generated(tokenizer: Any, text: str) -> list[int]:
    """An answer's tokens, with the one that ends it."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return [*ids, tokenizer.eos_token_id]


@pytest.mark.parametrize("turn", ANSWERS)
def test_a_turn_starts_with_every_token_of_the_turn_before(
    tokenizer: Any, turn: int
) -> None:
    """Prompt and answer of a turn, calls included, are the next prompt's start."""
    answer = generated(tokenizer, written(CONVERSATION[turn]))
    before = tokens(tokenizer, CONVERSATION[:turn]) + answer
    for end in range(turn + 1, len(CONVERSATION) + 1):
        assert tokens(tokenizer, CONVERSATION[:end])[: len(before)] == before


@given(st.text(max_size=40).filter(lambda text: text[:2].strip() or not text))
@settings(max_examples=200, deadline=None)
def test_any_answer_is_kept_token_by_token(tokenizer: Any, content: str) -> None:
    """No answer is lost to the way its text is cut into tokens.

    Except for one that begins with two white spaces or more: those join the
    line break before them.
    """
    history = CONVERSATION[:2]
    before = tokens(tokenizer, history) + generated(tokenizer, content)
    more = [{"role": "assistant", "content": content}, *CONVERSATION[7:8]]
    assert tokens(tokenizer, history + more)[: len(before)] == before


def test_normalised_arguments_cost_the_arguments_only(tokenizer: Any) -> None:
    """A call that was written in other spacing is kept up to the first of it."""
    wrote = (
        '<tool_call>\n{"name": "book_train", "arguments": {\n'
        '    "to": "Paris",\n    "seats": 2\n}}\n</tool_call>'
    )
    before = tokens(tokenizer, CONVERSATION[:2]) + generated(tokenizer, wrote)
    call = called(None, ("book_train", {"to": "Paris", "seats": 2}))
    after = tokens(tokenizer, [*CONVERSATION[:2], call])
    pairs = zip(before, after, strict=False)
    kept = tokenizer.decode([a for a, _ in takewhile(lambda p: p[0] == p[1], pairs)])
    assert kept.endswith('{"name": "book_train", "arguments":')


def test_calls_are_rendered_as_the_engine_has_them_written() -> None:
    """The engine's grammar for forced calls accepts what the template renders."""
    import xgrammar
    from vllm.tool_parsers.structural_tag_registry import get_hermes_structural_tag
    from xgrammar.openai_tool_call_schema import FunctionToolParam

    tools = [FunctionToolParam.model_validate(tool) for tool in TOOLS]
    tag = get_hermes_structural_tag(tools, [], "required", False)
    vocabulary = xgrammar.TokenizerInfo(["<s>", "x"], stop_token_ids=[0])
    grammar = xgrammar.GrammarCompiler(vocabulary).compile_structural_tag(tag)
    message = called(
        None,
        ("find_trains", {"to": "Rome", "day": "sunday"}),
        ("cancel", {"confirm": True}),
    )
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    assert matcher.accept_string(written(message))
    assert matcher.is_completed()


def test_vllm_hands_the_template_text() -> None:
    """vLLM joins content parts itself, and leaves developer messages in place."""
    from vllm.renderers import hf

    template = chat_template().read_text()
    assert hf._detect_content_format(template, default="openai") == "string"
    assert hf._detect_developer_role_support(template)


def test_the_prepared_model_answers(folder: Path, tokenizer: Any) -> None:
    """The weights survived their unpacking: it knows a capital."""
    import torch
    from transformers import AutoModelForCausalLM

    assert is_prepared(folder, verify=True)
    assert tokenizer.chat_template == chat_template().read_text()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"


def test_a_failed_conversion_says_why(tmp_path: Path) -> None:
    """What the converting process said last is in the error."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"no model")
    source = Source(path=path, sha256=hashlib.sha256(b"no model").hexdigest())
    with pytest.raises(ModelUnavailableError, match="Error"):
        prepare(tmp_path / "cache", source=source)
    models = tmp_path / "cache" / "kvloom" / "models"
    assert [left.suffix for left in models.iterdir()] == [".lock"]
