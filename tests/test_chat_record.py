"""Tests of `odb_megatron.data.chat_record`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from odb_megatron.data.chat_record import (
    Conversation,
    Layout,
    Message,
    PlainText,
    ToolCall,
    layout_of,
    parse_record,
)
from odb_megatron.data.records import open_records

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"

Turns = list[tuple[str, str]]
USER = {"role": "user", "content": "u"}
ANSWER = {"role": "assistant", "content": "a"}


def _turns(record: dict[str, object]) -> Turns:
    parsed = parse_record(record)
    assert isinstance(parsed, Conversation)
    return [(m.role, m.content) for m in parsed.messages]


@pytest.mark.parametrize(
    ("layout", "record", "turns"),
    [
        (Layout.MESSAGES, {"messages": [USER, ANSWER]}, "user:u assistant:a"),
        (
            Layout.MESSAGES,
            {
                "messages": [
                    {"role": "developer", "content": "d"},
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
                    },
                    ANSWER,
                ]
            },
            "developer:d user:xy assistant:a",
        ),
        (
            Layout.CONVERSATIONS,
            {
                "conversations": [
                    {"from": "human", "value": "u"},
                    {"from": "gpt", "value": "a"},
                    {"from": "user", "value": "v"},
                    {"from": "chatgpt", "value": "b"},
                    {"from": "observation", "value": "o"},
                    {"from": "tool_response", "value": "p"},
                    {"from": "bard", "value": "c"},
                ],
                "system": "s",
            },
            "system:s user:u assistant:a user:v assistant:b tool:o tool:p assistant:c",
        ),
        (Layout.CONVERSATIONS, {"conversations": [USER, ANSWER]}, "user:u assistant:a"),
        (Layout.INSTRUCTION, {"instruction": "i", "output": "o"}, "user:i assistant:o"),
        (
            Layout.INSTRUCTION,
            {
                "instruction": "i",
                "input": "x",
                "output": "o",
                "system": "s",
                "history": [["q", "r"]],
                "text": "ignored",
            },
            "system:s user:q assistant:r user:i\nx assistant:o",
        ),
        (
            Layout.INSTRUCTION,
            {"instruction": "i", "context": "c", "response": "o", "category": "k"},
            "user:i\nc assistant:o",
        ),
        (
            Layout.INSTANCES,
            {
                "instruction": "i",
                "instances": [{"input": "x", "output": "o"}, {"input": "z", "output": "p"}],
            },
            "user:i\nx assistant:o",
        ),
        (Layout.PAIR, {"input": "x", "output": "o"}, "user:x assistant:o"),
        (
            Layout.PAIR,
            {"system_prompt": "s", "question": "q", "response": "r"},
            "system:s user:q assistant:r",
        ),
        (
            Layout.PAIR,
            {"solution": "s", "answer": "n", "problem": "p", "question": None},
            "user:p assistant:n",
        ),
        (Layout.PAIR, {"prompt": [USER], "completion": [ANSWER]}, "user:u assistant:a"),
    ],
)
def test_layouts(layout: Layout, record: dict[str, object], turns: str) -> None:
    assert layout_of(record) is layout
    assert " ".join(f"{role}:{content}" for role, content in _turns(record)) == turns


@pytest.mark.parametrize("response", ["response", "completion", "answer", "output", "solution"])
@pytest.mark.parametrize("prompt", ["prompt", "question", "query", "input", "problem"])
def test_pairs(prompt: str, response: str) -> None:
    assert _turns({prompt: "p", response: "r"}) == [("user", "p"), ("assistant", "r")]


@pytest.mark.parametrize(
    ("record", "layout"),
    [
        ({"text": "t"}, Layout.TEXT),
        ({"text": "t", "prompt": "p"}, Layout.TEXT),
        ({"prompt": "t", "id": 3, "topics": ["x"], "answer": None}, Layout.PROMPT),
    ],
)
def test_plain_text(record: dict[str, object], layout: Layout) -> None:
    assert layout_of(record) is layout
    assert parse_record(record) == PlainText(text="t")


def test_precedence() -> None:
    record: dict[str, object] = {
        "messages": [USER, ANSWER],
        "conversations": [USER, ANSWER],
        "instances": [{"output": "o"}],
        "instruction": "i",
        "output": "o",
        "prompt": "p",
        "text": "t",
    }
    seen = []
    for column in ("messages", "conversations", "instances", "instruction", "output", "text", ""):
        seen.append(layout_of(record))
        record[column] = None
    assert seen == list(Layout)


def test_tools_and_calls() -> None:
    function = {"name": "f", "parameters": {}}
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"function": {"name": "f", "arguments": {"y": 2}}},
        {"function": {"name": "g", "arguments": "not json"}},
        {"function": {"name": "h"}},
    ]
    parsed = parse_record(
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"},
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "f", "arguments": "{}"},
                },
                {"role": "function", "name": "f", "content": "s"},
            ],
            "tools": [{"type": "function", "function": function}],
        }
    )
    assert isinstance(parsed, Conversation)
    assert parsed.tools == ({"type": "function", "function": function},)
    assert parsed.messages[1].tool_calls == (
        ToolCall(name="f", arguments={"x": 1}, call_id="1"),
        ToolCall(name="f", arguments={"y": 2}),
        ToolCall(name="g", arguments="not json"),
        ToolCall(name="h", arguments={}),
    )
    assert parsed.messages[2] == Message(role="tool", content="r", tool_call_id="1", name="f")
    assert parsed.messages[3].tool_calls == (ToolCall(name="f", arguments={}),)
    assert parsed.messages[4].role == "tool"

    parsed = parse_record(
        {
            "conversations": [
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "function_call", "value": '[{"name": "f"}, {"name": "g"}]'},
            ],
            "tools": '[{"name": "f", "parameters": {}}]',
        }
    )
    assert isinstance(parsed, Conversation)
    assert [len(m.tool_calls) for m in parsed.messages] == [1, 2]
    assert parsed.tools == ({"type": "function", "function": function},)
    for tools in ("", "[]", [], None):
        none = parse_record({"messages": [USER, ANSWER], "tools": tools})
        assert isinstance(none, Conversation)
        assert none.tools == ()


def test_what_is_learnt() -> None:
    parsed = parse_record({"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]})
    assert isinstance(parsed, Conversation)
    assert [m.learn for m in parsed.messages if m.role == "assistant"] == [False, True]
    parsed = parse_record({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})
    assert isinstance(parsed, Conversation)
    assert [m.learn for m in parsed.messages] == [False, False, False, True]
    parsed = parse_record({"messages": [USER, {**ANSWER, "reasoning_content": "why"}]})
    assert isinstance(parsed, Conversation)
    assert parsed.messages[1].reasoning == "why"


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({}, "columns none fit no known layout; expected messages, or"),
        (
            {"id": 1, "prompt": "p", "chosen": "c"},
            "columns id, prompt, chosen fit no known .* Rename",
        ),
        ({"prompt": "p", "chosen": [{"role": "x"}]}, "columns prompt, chosen fit no known layout"),
        ({"instruction": "i", "output": None}, r"columns instruction, output \(null\) fit no"),
        ({"prompt": {"text": "p", "replies": []}}, "a message tree .* holds many conversations"),
        ({"messages": "x"}, "^messages is of type str; expected a list"),
        ({"messages": []}, "the conversation is empty"),
        ({"messages": [3]}, r"messages\[0\] is of type int; expected an object"),
        ({"messages": [{"text": "x"}]}, r"messages\[0\] has keys text; expected role and content"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is null or missing; expected t"),
        ({"messages": [{"role": 3}]}, r"messages\[0\].role is of type int; expected text"),
        (
            {"messages": [{"role": "bot", "content": ""}]},
            r"messages\[0\].role is 'bot'; known roles: assistant, bard",
        ),
        ({"messages": [USER]}, "no assistant message with content to learn from; roles seen: user"),
        ({"messages": [USER, {**ANSWER, "content": " "}]}, "no assistant message with content"),
        ({"messages": [{**ANSWER, "weight": 0}]}, "no assistant message with content to learn"),
        ({"messages": [{**ANSWER, "content": None}]}, r"messages\[0\].content is null or missing"),
        ({"messages": [{**ANSWER, "content": 3}]}, r"messages\[0\].content is of type int; expe"),
        ({"messages": [{**ANSWER, "weight": 0.5}]}, r"messages\[0\].weight is 0.5; expected 0 or"),
        ({"messages": [{**ANSWER, "name": 3}]}, r"messages\[0\].name is of type int; expected t"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"messages\[0\].content\[0\] is a part of type 'image_url'; only text parts",
        ),
        (
            {"messages": [{**ANSWER, "tool_calls": [{"function": {}}]}]},
            r"messages\[0\].tool_calls\[0\].name is null or missing; expected text",
        ),
        (
            {"messages": [{**ANSWER, "tool_calls": [{"name": "f", "arguments": 3}]}]},
            r"tool_calls\[0\].arguments is of type int; expected an object or its JSON text",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "f(x)"}]},
            r"conversations\[0\].value is text that is not valid JSON: ",
        ),
        ({"conversations": [{"from": "gpt"}]}, r"conversations\[0\].value is null or missing"),
        ({"messages": [ANSWER], "tools": "f"}, "tools is text that is not valid JSON"),
        ({"messages": [ANSWER], "tools": [{}]}, r"tools\[0\].name is null or missing"),
        ({"messages": [ANSWER], "system": 3}, "system is of type int; expected text"),
        (
            {"messages": [{"role": "system", "content": "s"}, ANSWER], "system": "s"},
            "has a system column and its first message is a system message too; keep one",
        ),
        ({"instruction": "i", "output": 3}, "output is of type int; expected text"),
        (
            {"instruction": "i", "output": "o", "history": [["q"]]},
            r"history\[0\] has 1 items; expected \[user text, assistant text\]",
        ),
        ({"instruction": "i", "instances": []}, "instances is empty; expected at least one"),
        ({"instruction": "i", "instances": [{}]}, r"instances\[0\].output is null or missing"),
        ({"question": "q", "answer": 3}, "answer is of type int; expected text"),
        ({"question": "q", "answer": " "}, "no assistant message with content"),
        ({"prompt": [USER], "completion": "c"}, "prompt is of type list; expected text"),
        ({"text": " \n"}, "the text is empty; expected at least one character"),
        ({"text": 3}, "text is of type int; expected text"),
    ],
)
def test_errors(record: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_record(record)


@pytest.mark.parametrize(
    ("name", "layout", "num_records", "num_turns"),
    [
        ("HumanEval.jsonl.gz", Layout.PAIR, 164, 328),
        ("glaive_toolcall_en_demo.json", Layout.CONVERSATIONS, 300, 1914),
        ("gsm8k_test.jsonl", Layout.PAIR, 1319, 2638),
        ("longchat_5_topics.jsonl", Layout.PROMPT, 50, 0),
        ("longchat_10_topics.jsonl", Layout.PROMPT, 50, 0),
        ("self_instruct_seed_tasks.jsonl", Layout.INSTANCES, 175, 350),
    ],
)
def test_real_files(name: str, layout: Layout, num_records: int, num_turns: int) -> None:
    if not (DATA / name).is_file():
        pytest.skip(f"shared data file {name} is not here")
    records = open_records(str(DATA / name))
    assert Counter(layout_of(r) for r in records) == {layout: num_records}
    parsed = [parse_record(r) for r in records]
    assert sum(len(p.messages) for p in parsed if isinstance(p, Conversation)) == num_turns
    if "glaive" in name:
        assert sum(bool(p.tools) for p in parsed if isinstance(p, Conversation)) == 191


def test_the_message_trees_are_refused_by_name() -> None:
    path = DATA / "oasst_en_100_tree.jsonl"
    if not path.is_file():
        pytest.skip("shared data file oasst_en_100_tree.jsonl is not here")
    for record in open_records(str(path)):
        with pytest.raises(ValueError, match="a message tree"):
            parse_record(record)
