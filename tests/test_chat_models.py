"""What is learnt of each kind of record with the chat templates of many models.

TRL's training versions must give transformers' own ids and mask; for templates that nobody marked,
what is learnt is written here by hand.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vendor_templates import TEMPLATES

pytest.importorskip("transformers", reason="transformers is not installed")

from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.chat_record import ChatFormatError, parse_record
from odb_megatron.data.tokenizer import load_tokenizer, train_bpe

_TRL = importlib.util.find_spec("trl")
_FOLDER = Path(*(_TRL.submodule_search_locations if _TRL else None) or (".",)) / "chat_templates"
SOURCES = {path.stem: path.read_text() for path in sorted(_FOLDER.glob("*.jinja"))}
TRAINED = [name for name in SOURCES if f"{name}_training" in SOURCES]

_CONTROL = re.compile(
    r"<[|｜][^<>'\"{}\s]{1,40}[|｜]>|</?s>|<(?:end_of_turn|start_of_turn|sop|turn\||\|turn)>"
    r"|\[/?[A-Z_]{3,}\]|<\w+_of_(?:sentence|utterance)>|<reserved_\d+>|\[\|\w+\|\]"
)


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


_CALL_ID = "call00001"


def _weather(arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"type": "function", "id": _CALL_ID, "function": function}
    answer = {"role": "tool", "name": "get_weather", "tool_call_id": _CALL_ID, "content": "sunny"}
    turns = [_user("Weather?"), _assistant("", tool_calls=[call]), answer]
    return {"messages": [*turns, _assistant("Sunny today.")], "tools": TOOLS}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "a city"}},
                "required": ["city"],
            },
        },
    }
]
_SYSTEM = {"role": "system", "content": "Be brief."}
_MORE = [_user("Why not?"), _assistant("Because, I think.")]
KINDS: dict[str, dict[str, Any]] = {
    "one": {"messages": [_user("What?"), _assistant("It is so.")]},
    "system": {"messages": [_SYSTEM, _user("What?"), _assistant("It is so."), *_MORE]},
    "three": {
        "messages": [
            *(_user("What?"), _assistant("It is so."), *_MORE),
            *(_user("Hm?"), _assistant("Done!")),
        ]
    },
    "tool": _weather({"city": "Paris"}),
    "tool as text": _weather('{"city": "Paris"}'),
    "reasoning": {
        "messages": [_user("What?"), _assistant("It is so.", reasoning_content="Let me think.")]
    },
    "first": {"messages": [_assistant("Welcome!"), _user("What?"), _assistant("It is so.")]},
    "loss": {"messages": [_user("What?"), _assistant("BAD one", loss=False), *_MORE]},
}


@pytest.fixture(scope="module", autouse=True)
def _the_date_stands_still() -> Iterator[None]:
    class Day(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Day:
            return cls(2024, 7, 26, tzinfo=tz)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.utils.chat_template_utils.datetime", Day)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = ["hello what is the weather in Paris? It is sunny and I think so"] * 5
    return train_bpe(texts, vocab_size=400, folder=tmp_path_factory.mktemp("bpe") / "tokenizer")


def _tokenizer(folder: Path, template: str) -> Any:
    from transformers import AddedToken

    loaded = load_tokenizer(folder)
    control = sorted(set(_CONTROL.findall(template)) | {"<s>", "</s>"})
    control += [f"[|{role}|]" for role in ("system", "user", "assistant")]
    loaded.add_tokens([AddedToken(one, special=True, normalized=False) for one in control])
    loaded.bos_token, loaded.eos_token = "<s>", "</s>"
    loaded.chat_template = template
    return loaded


def _learnt(tokenizer: Any, ids: Any, weights: Any) -> list[str]:
    """Each piece that carries loss, without the white space around it."""
    edges = np.flatnonzero(np.diff(np.asarray(weights) > 0, prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(ids[start:end]).strip() for start, end in edges.tolist()]


# --- TRL's training versions --------------------------------------------------------------------


def _forms(record: dict[str, Any], source: str) -> Iterator[dict[str, Any]]:
    """The record as this or that template wants it."""
    messages = [{k: v for k, v in m.items() if k != "loss"} for m in record["messages"]]
    tools = record.get("tools")
    if tools and "tools" not in source:
        listed = "# Tools\n" + "\n".join(map(json.dumps, tools))
        messages, tools = [{"role": "system", "content": listed}, *messages], None
    if "tool_calls" not in source:
        line = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
        messages = [_assistant(line) if "tool_calls" in m else m for m in messages]
    for arguments in ({"city": "Paris"}, '{"city": "Paris"}'):
        for nothing in ("", None):
            turns = json.loads(json.dumps(messages))
            for call in (call for turn in turns for call in turn.get("tool_calls", ())):
                call["function"]["arguments"] = arguments
            for turn in turns:
                turn["content"] = turn["content"] or nothing
            yield {"conversation": turns, "tools": tools}
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    yield {"conversation": parts, "tools": tools}


def _transformers(
    tokenizer: Any, record: dict[str, Any], template: str
) -> tuple[list[int], list[float]] | None:
    """Ids and mask in the first form of which nothing is left out; None if there is none."""
    wanted = [m["content"] for m in record["messages"]]
    wanted += [m["reasoning_content"] for m in record["messages"] if "reasoning_content" in m]
    wanted += ["get_weather", "Paris"] if "tools" in record else []
    for form in _forms(record, template):
        try:
            found = tokenizer.apply_chat_template(
                **form,
                chat_template=template,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception:  # whatever a template meets
            continue
        text = tokenizer.decode(found["input_ids"])
        if all(one in text for one in wanted) and '\\"city' not in text:
            mask = np.array(found["assistant_masks"], dtype=float)
            for number, message in enumerate(
                m for m in record["messages"] if m["role"] == "assistant"
            ):
                if not message.get("loss", True):
                    edges = np.flatnonzero(np.diff(mask > 0, prepend=0, append=0))
                    mask[edges[2 * number] : edges[2 * number + 1]] = 0
            return found["input_ids"], mask.tolist()
    return None


# What transformers cannot render, or renders without a tool call, its answer or the reasoning.
_TOOLS = ("tool", "tool as text")
REFUSED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("cohere", "cohere2", "gemma3"), (*_TOOLS, "reasoning", "first")),
    "gemma": (*_TOOLS, "reasoning", "first", "system"),
    **dict.fromkeys(("llava_next", "phi3", "phi3_5"), (*_TOOLS, "reasoning")),
    **dict.fromkeys(
        ("deepseek_r1_distill", "deepseekv3", "idefics3", "lfm2", "lfm2_v2", "llama3", "smolvlm"),
        ("reasoning",),
    ),
    **dict.fromkeys(("qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"), ("reasoning",)),
}
# Its template wants content that is null, which apply_chat_template of transformers 5.24 takes out.
_R1_TOOL = [
    "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>',
    "<｜tool▁outputs▁end｜>Sunny today.<｜end▁of▁sentence｜>",
]


@pytest.mark.parametrize("name", TRAINED)
def test_trls_training_version_is_masked_as_by_transformers(folder: Path, name: str) -> None:
    training = SOURCES[f"{name}_training"]
    tokenizer = _tokenizer(folder, SOURCES[name])
    renderer = ChatRenderer(tokenizer)
    assert renderer.template().origin == f"TRL's training version of {name}"
    for kind, record in KINDS.items():
        expected = _transformers(tokenizer, record, training)
        if kind in REFUSED.get(name, ()):
            assert expected is None, kind
            with pytest.raises(ValueError, match="chat template") as caught:
                renderer.render(parse_record(record))
            assert not isinstance(caught.value, ChatFormatError)
            continue
        ids, weights = renderer.render(parse_record(record))
        if name == "deepseek_r1_distill" and kind in _TOOLS:
            assert _learnt(tokenizer, ids, weights) == _R1_TOOL
            continue
        assert expected is not None, kind
        assert ids.tolist() == expected[0], kind
        assert weights.tolist() == expected[1], kind


@pytest.mark.parametrize("key", ["thinking", "reasoning", "reasoning_content"])
@pytest.mark.parametrize("name", ["gptoss", "qwen3"])
def test_reasoning_by_any_name_is_rendered(folder: Path, name: str, key: str) -> None:
    if name not in SOURCES:
        pytest.skip("TRL is not installed")
    renderer = ChatRenderer(_tokenizer(folder, SOURCES[name]))
    turns = [_user("What?"), _assistant("It is so.", **{key: "Let me think."})]
    given, expected = (
        renderer.render(parse_record(record))
        for record in ({"messages": turns}, KINDS["reasoning"])
    )
    assert all(np.array_equal(a, b) for a, b in zip(given, expected, strict=True))


# --- templates that nobody marked ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What a model says: `{}` is the text of a turn.

    Attributes:
        turn, last: in the middle and at the end of a conversation; the latter as the former if
            empty.
        call: of the tool; null where the tool kinds are refused.
        reasoned: of the reasoning kind; null where it is refused.
        refused: kinds that the template itself refuses.
    """

    turn: str
    last: str = ""
    call: str | None = None
    reasoned: str | None = None
    refused: tuple[str, ...] = ()

    def expected(self, kind: str) -> list[str] | None:
        refusals = {"reasoning": self.reasoned, **dict.fromkeys(_TOOLS, self.call)}
        if kind in self.refused or refusals.get(kind, "") is None:
            return None
        if kind == "reasoning":
            return [str(self.reasoned)]
        record = KINDS[kind]["messages"]
        said = [m for m in record if m["role"] == "assistant" and m.get("loss", True)]
        turns = [self.turn] * (len(said) - 1) + [self.last or self.turn]
        return [
            str(self.call) if "tool_calls" in m else turn.format(m["content"])
            for m, turn in zip(said, turns, strict=True)
        ]


_JSON_CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
_LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Paris"}}<|eot_id|>'
_QWEN_CALL = f"<tool_call>\n{_JSON_CALL}\n</tool_call><|im_end|>"
_XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>"
)
_DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>'
)
_DEEPSEEK_END = "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
_GEMMA_CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
_THOUGHT = "<|channel>thought\nLet me think.\n<channel|>It is so.<turn|>"
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_THINK = "<think>\nLet me think.\n</think>\n\nIt is so.<|im_end|>"
_ALTERNATE = ("tool", "tool as text", "first")

# As the vendor's template prints it, from the end of its generation prompt to the token by which
# the model stops (GLM's, ChatGLM's and Baichuan's do by that of the next role).
UNMARKED = {
    "cohere": Turns(turn="{}<|END_OF_TURN_TOKEN|>", refused=_ALTERNATE),
    "cohere2": Turns(turn="{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", refused=_ALTERNATE),
    "deepseek_r1_distill": Turns(turn="{}<｜end▁of▁sentence｜>", call=_DEEPSEEK_CALL),
    "deepseekv3": Turns(turn="{}<｜end▁of▁sentence｜>", call=_DEEPSEEK_CALL + _DEEPSEEK_END),
    "diffusion_gemma": Turns(
        turn="{}<turn|>", call=f"{_GEMMA_CALL}<|tool_response>", reasoned=_THOUGHT
    ),
    "gemma": Turns(turn="{}<end_of_turn>", refused=(*_ALTERNATE, "system")),
    "gemma3": Turns(turn="{}<end_of_turn>", refused=_ALTERNATE),
    "gemma4": Turns(turn="{}<turn|>", call=f"{_GEMMA_CALL}<|tool_response>"),
    "gemma4_v2": Turns(turn="{}<turn|>", call=f"{_GEMMA_CALL}<turn|>"),
    "gemma4_v3": Turns(turn="{}<turn|>", call=f"{_GEMMA_CALL}<|tool_response>"),
    "gemma4_v4": Turns(turn="{}<turn|>", call=f"{_GEMMA_CALL}<|tool_response>"),
    "gemma4_v5": Turns(turn="{}<turn|>", call=f"{_GEMMA_CALL}<|tool_response>", reasoned=_THOUGHT),
    "glm4moe": Turns(
        turn="<think></think>\n{}<|user|>",
        call="<think></think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n</tool_call><|observation|>",
        reasoned="<think>Let me think.</think>\nIt is so.<|user|>",
    ),
    "gptoss": Turns(
        turn="<|channel|>final<|message|>{}<|end|>",
        last="<|channel|>final<|message|>{}<|return|>",
        call="to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Paris"}<|call|>',
        reasoned="<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is so.<|return|>",
    ),
    "idefics3": Turns(turn="{}<end_of_utterance>", call=f"{_JSON_CALL}<end_of_utterance>"),
    "lfm2": Turns(turn="{}<|im_end|>", call=f"{_JSON_CALL}<|im_end|>"),
    "lfm2_v2": Turns(
        turn="{}<|im_end|>",
        call="<|tool_call_start|>[get_weather(city='Paris')]<|tool_call_end|><|im_end|>",
    ),
    "llama3": Turns(turn="{}<|eot_id|>", call=f"{_JSON_CALL}<|eot_id|>"),
    "llama3_1": Turns(turn="{}<|eot_id|>", call=_LLAMA_CALL),
    "llama3_2": Turns(turn="{}<|eot_id|>", call=_LLAMA_CALL),
    "llava_next": Turns(turn="{}</s>"),
    "muse_glimmer": Turns(
        turn="to=user<|message|>{}<|eot|>",
        call="to=get_weather<|message|><atem:function_calls>\n"
        '<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eot|>",
        reasoned="to=self<|message|>Let me think.<|eom|><|start|>assistant to=user<|message|>"
        "It is so.<|eot|>",
    ),
    **dict.fromkeys(
        ("nemotron_3_5_lightning", "nemotron_3_ultra"),
        Turns(
            turn="</think>{}<|im_end|>",
            call=f"</think>\n{_XML_CALL}\n<|im_end|>",
            reasoned="Let me think.</think>It is so.<|im_end|>",
        ),
    ),
    **dict.fromkeys(
        ("nemotron_3_nano", "nemotron_3_super"),
        Turns(
            turn="</think>{}<|im_end|>",
            call=f"</think>\n{_XML_CALL}\n<|im_end|>",
            reasoned="Let me think.\n</think>\nIt is so.<|im_end|>",
        ),
    ),
    **dict.fromkeys(("phi3", "phi3_5"), Turns(turn="{}<|end|>")),
    "qwen2_5": Turns(turn="{}<|im_end|>", call=_QWEN_CALL),
    "qwen2_5_vl": Turns(turn="{}<|im_end|>", call=f"{_JSON_CALL}<|im_end|>"),
    "qwen3": Turns(
        turn="{}<|im_end|>",
        last=_NO_THOUGHT + "{}<|im_end|>",
        call=_QWEN_CALL,
        reasoned=_THINK,
    ),
    **dict.fromkeys(
        ("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"),
        Turns(
            turn="{}<|im_end|>",
            last=_NO_THOUGHT + "{}<|im_end|>",
            call=f"{_NO_THOUGHT}{_XML_CALL}<|im_end|>",
            reasoned=_THINK,
        ),
    ),
    "qwen3_8": Turns(
        turn="</think>\n\n{}<|im_end|>",
        call=f"</think>\n\n{_XML_CALL}<|im_end|>",
        reasoned=_THINK.removeprefix("<think>\n"),
    ),
    "qwen3_instruct_2507": Turns(turn="{}<|im_end|>", call=_QWEN_CALL),
    "qwen3_vl": Turns(turn="{}<|im_end|>", call=_QWEN_CALL),
    "smolvlm": Turns(turn="{}<end_of_utterance>", call=f"{_JSON_CALL}<end_of_utterance>"),
    # Of vendor_templates.py.
    "alpaca": Turns(turn="{}</s>", call=f"{_JSON_CALL}</s>"),
    "baichuan2": Turns(turn="{}<reserved_106>"),
    "chatglm3": Turns(turn="{}<|user|>", call=f"{_JSON_CALL}<|tool|>"),
    "command_r": Turns(turn="<|START_RESPONSE|>{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "exaone": Turns(turn="{}[|endofturn|]", call=f"{_JSON_CALL}[|endofturn|]"),
    "falcon3": Turns(
        turn="{}</s>",
        call='<tool_call>\n[{"type": "function", "function": '
        + _JSON_CALL
        + ', "id": "call00001"}]'
        "\n</tool_call></s>",
    ),
    "granite": Turns(turn="{}<|end_of_text|>", call=f"{_JSON_CALL}<|end_of_text|>"),
    "hunyuan": Turns(turn="{}<|eos|>"),
    **dict.fromkeys(
        ("internlm2", "yi", "phi4", "qwen1_5", "qwen1_5_first", "reasoning_dropped"),
        Turns(turn="{}<|im_end|>", call=f"{_JSON_CALL}<|im_end|>"),
    ),
    # Prints the id of a call in place of its name: see the test below.
    "kimi_k2": Turns(turn="{}<|im_end|>"),
    "llama2": Turns(turn="{} </s>", refused=_ALTERNATE),
    "minimax": Turns(turn="{}<end_of_sentence>", call=f"{_JSON_CALL}<end_of_sentence>"),
    "mistral_nemo": Turns(
        turn="{}</s>",
        call=f'[TOOL_CALLS][{_JSON_CALL[:-1]}, "id": "call00001"}}]</s>',
        refused=("first",),
    ),
    "mistral_v1": Turns(turn="{}</s>", refused=(*_ALTERNATE, "system")),
    "mistral_v3": Turns(
        turn="{}</s>",
        call=f'[TOOL_CALLS] [{_JSON_CALL[:-1]}, "id": "call00001"}}]</s>',
        refused=("first",),
    ),
    "olmo2": Turns(turn="{}</s>"),
    "seed_oss": Turns(
        turn="{}</s>",
        call=f"{_JSON_CALL}</s>",
        reasoned="<seed:think>Let me think.</seed:think>It is so.</s>",
    ),
    "vicuna": Turns(turn="{}</s>"),
    "zephyr": Turns(turn="{}</s>"),
}


@pytest.mark.parametrize("name", UNMARKED)
def test_turns_are_found_where_nobody_marked_them(folder: Path, name: str) -> None:
    if name not in SOURCES and name not in TEMPLATES:
        pytest.skip("TRL is not installed")
    source = TEMPLATES.get(name) or SOURCES[name] + "{# other #}"
    tokenizer = _tokenizer(folder, source)
    renderer = ChatRenderer(tokenizer)
    assert renderer.template().origin.startswith("the tokenizer's own; what is learnt was found")
    for kind, record in KINDS.items():
        expected = UNMARKED[name].expected(kind)
        if expected is None:
            with pytest.raises(ValueError, match="chat template") as caught:
                renderer.render(parse_record(record))
            assert not isinstance(caught.value, ChatFormatError)
        else:
            assert _learnt(tokenizer, *renderer.render(parse_record(record))) == expected, kind


def test_every_vendors_template_is_in_the_table() -> None:
    marked = {name for name, source in SOURCES.items() if "endgeneration" in source}
    assert {*SOURCES, *TEMPLATES} - marked == set(UNMARKED) or not SOURCES


@pytest.mark.parametrize("name", ["chatglm3", "glm4moe"])
def test_an_empty_turn_after_one_that_ends_with_the_next_role(folder: Path, name: str) -> None:
    if name not in SOURCES and name not in TEMPLATES:
        pytest.skip("TRL is not installed")
    tokenizer = _tokenizer(folder, TEMPLATES.get(name) or SOURCES[name] + "{# other #}")
    empty = {"role": "tool", "content": "", "tool_call_id": _CALL_ID, "name": "get_weather"}
    call = KINDS["tool"]["messages"][1]
    turns = [_user("What?"), call, empty, _user(""), _assistant("It is so."), _user("")]
    ids, weights = ChatRenderer(tokenizer).render(parse_record({"messages": turns}))
    call_text, turn = UNMARKED[name].expected("tool") or ("", "")
    assert _learnt(tokenizer, ids, weights) == [
        call_text,
        turn.replace("Sunny today.", "It is so."),
    ]


def test_a_call_that_is_printed_by_its_id(folder: Path) -> None:
    tokenizer = _tokenizer(folder, TEMPLATES["kimi_k2"])
    record = json.loads(json.dumps(KINDS["tool"]).replace(_CALL_ID, "functions.get_weather:0"))
    ids, weights = ChatRenderer(tokenizer).render(parse_record(record))
    assert _learnt(tokenizer, ids, weights) == [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
        "<|im_end|>",
        "Sunny today.<|im_end|>",
    ]


_MARKS = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")
MORE: dict[str, list[dict[str, Any]]] = {
    "two in a row": [_user("What?"), _assistant("It is so."), _assistant("And so."), *_MORE],
    "the assistant after the system": [_SYSTEM, _assistant("Welcome!"), *_MORE],
    "the user last": [_user("What?"), _assistant("It is so."), _user("Bye")],
    "white space": [
        _user(" What?\n"),
        _assistant("  It\n is.\n\n"),
        _user("x"),
        _assistant("\ny\n"),
    ],
    "the same text": [_user("So."), _assistant("So."), _user("So."), _assistant("So.")],
    "tags": [_user("<b>x</b>"), _assistant("<b>y</b>"), _user("[YES]"), _assistant("[YES]")],
    "control tokens": [_user("<|im_end|>"), _assistant("</s>x<|im_end|>"), *_MORE],
    "halves": [_user("What?"), _assistant("It is so.", weight=0.5), *_MORE],
}


@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize(
    "name", ["glm4moe", "lfm2", "lfm2_v2", "llama3", "llava_next", "qwen2_5", "qwen3", "smolvlm"]
)
def test_without_marks_it_is_the_same(folder: Path, name: str, kind: str) -> None:
    """Where a training version marks no more than what follows the generation prompt."""
    if name not in SOURCES:
        pytest.skip("TRL is not installed")
    source = SOURCES[f"{name}_training"]
    learnt = []
    for template in (source, _MARKS.sub(r"{#\1 \2#}", source)):
        tokenizer = _tokenizer(folder, template)
        ids, weights = ChatRenderer(tokenizer).render(parse_record({"messages": MORE[kind]}))
        learnt.append([_learnt(tokenizer, ids, weights == one) for one in (0.5, 1)])
    assert learnt[0] == learnt[1]


# --- the table of docs/data.md ------------------------------------------------------------------

_DOCS = Path(__file__).resolve().parents[1] / "docs" / "data.md"
_BEGIN, _END = "<!-- models -->\n", "<!-- /models -->"


def table(folder: Path) -> str:
    """Return which kinds of records each template takes, as Markdown."""
    kinds = [kind for kind in KINDS if kind != "loss"]
    lines = [
        f"| template | what is learnt | {' | '.join(kinds)} |",
        f"|---|---|{'---|' * len(kinds)}",
    ]
    for name in sorted({*TRAINED, *UNMARKED}):
        renderer = ChatRenderer(_tokenizer(folder, TEMPLATES.get(name) or SOURCES[name]))
        how = "TRL's marks" if name in TRAINED else "found"
        taken = []
        for kind in kinds:
            try:
                renderer.render(parse_record(KINDS[kind]))
                taken.append("yes")
            except ValueError:
                taken.append("refused")
        lines.append(f"| {name} | {how} | {' | '.join(taken)} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_the_docs(folder: Path) -> None:
    if not SOURCES:
        pytest.skip("TRL is not installed")
    written = _DOCS.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]
    assert written == table(folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        trained = train_bpe(["hello"] * 5, vocab_size=300, folder=Path(place) / "tokenizer")
        before, _, rest = _DOCS.read_text(encoding="utf-8").partition(_BEGIN)
        after = rest.partition(_END)[2]
        _DOCS.write_text(f"{before}{_BEGIN}{table(trained)}{_END}{after}", encoding="utf-8")
