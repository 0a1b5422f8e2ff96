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
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from jinja2 import TemplateError

from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.chat_record import ChatFormatError, parse_record
from odb_megatron.data.tokenizer import load_tokenizer, train_bpe


def _templates(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


_TRL = importlib.util.find_spec("trl")
SOURCES = _templates(
    Path(*(_TRL.submodule_search_locations if _TRL else None) or ("none",)) / "chat_templates"
)
TRAINED = [name for name in SOURCES if f"{name}_training" in SOURCES]
# In the shapes of models for which TRL has none, none of them marked.
OTHERS = _templates(Path(__file__).with_name("chat_templates"))

_CONTROL = re.compile(
    r"<[|｜][^<>'\"{}\s]{1,40}[|｜]>|</?s>|<(?:end_of_turn|start_of_turn|sop|turn\||\|turn)>"
    r"|\[/?[A-Z_]{3,}\]|<\w+_of_(?:sentence|utterance)>|<reserved_\d+>|\[\|\w+\|\]"
)


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


_CALL_ID = "call00001"


def _weather(arguments: Any, num_turns: int = 4) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"type": "function", "id": _CALL_ID, "function": function}
    answer = {"role": "tool", "name": "get_weather", "tool_call_id": _CALL_ID, "content": "sunny"}
    turns = [_user("Weather?"), _assistant("", tool_calls=[call]), answer]
    turns = [*turns, _assistant("Sunny today.")][:num_turns]
    city = {"type": "string", "description": "a city"}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tool = {"name": "get_weather", "description": "weather", "parameters": parameters}
    return {"messages": turns, "tools": [{"type": "function", "function": tool}]}


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
    "call": _weather({"city": "Paris"}, num_turns=2),
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
        except (TemplateError, TypeError):  # the template refuses this form, or cannot add it up
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
    "gemma": (*_TOOLS, "reasoning", "first", "system", "call"),
    **dict.fromkeys(("llava_next", "phi3", "phi3_5"), (*_TOOLS, "reasoning")),
    **dict.fromkeys(
        ("deepseek_r1_distill", "deepseekv3", "idefics3", "lfm2", "lfm2_v2", "llama3", "smolvlm"),
        ("reasoning",),
    ),
    **dict.fromkeys(("qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"), ("reasoning",)),
}
# Its template wants content that is null, which apply_chat_template of transformers 5.24 takes out.
_R1_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>'
)
_R1_TOOL = [
    f"<｜Assistant｜>{_R1_CALL}",
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
        if name == "deepseek_r1_distill" and kind in (*_TOOLS, "call"):
            assert _learnt(tokenizer, ids, weights) == _R1_TOOL[: 1 + (kind != "call")]
            continue
        assert expected is not None, kind
        assert ids.tolist() == expected[0], kind
        assert weights.tolist() == expected[1], kind


# --- templates that nobody marked ---------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """What a model says, from the end of its generation prompt to the token by which it stops.

    Attributes:
        end, head: around the text of a turn.
        last_end, last_head: of the last turn, where they are others.
        call: of the tool; null where the tool kinds are refused.
        call_end, last_call: where they are others.
        thought: its reasoning with what is around it; null where it is refused.
        refused: kinds that the template itself refuses.
    """

    end: str
    head: str = ""
    last_end: str | None = None
    last_head: str | None = None
    call: str | None = None
    call_end: str | None = None
    last_call: str | None = None
    thought: str | None = None
    refused: tuple[str, ...] = ()

    def expected(self, kind: str) -> list[str] | None:
        parts = {"reasoning": self.thought, **dict.fromkeys(_TOOLS, self.call)}
        if kind in self.refused or parts.get(kind, "") is None:
            return None
        record = KINDS[kind]["messages"]
        texts = []
        for at, message in enumerate(record):
            is_last = at == len(record) - 1
            end = self.last_end if is_last and self.last_end is not None else self.end
            head = self.last_head if is_last and self.last_head is not None else self.head
            if "tool_calls" in message:
                call = self.call or self.head + _JSON_CALL
                call = self.last_call or call if is_last else call
                texts.append(call + (end if self.call_end is None else self.call_end))
            elif message["role"] == "assistant" and message.get("loss", True):
                head = str(self.thought) if "reasoning_content" in message else head
                texts.append(head + message["content"] + end)
        return texts


_JSON_CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
_LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
_QWEN_CALL = f"<tool_call>\n{_JSON_CALL}\n</tool_call>"
_MISTRAL_CALL = f'[{_JSON_CALL[:-1]}, "id": "call00001"}}]'
_FALCON_CALL = f'[{{"type": "function", "function": {_JSON_CALL}, "id": "call00001"}}]'
_XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>"
)
_GLM_CALL = (
    "<think></think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
    "<arg_value>Paris</arg_value>\n</tool_call>"
)
_OSS_CALL = 'to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}'
_OSS_THOUGHT = "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
_MUSE_CALL = (
    'to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)
_MUSE_THOUGHT = "to=self<|message|>Let me think.<|eom|><|start|>assistant to=user<|message|>"
_GEMMA_CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
_GEMMA_THOUGHT = "<|channel>thought\nLet me think.\n<channel|>"
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_QWEN_THOUGHT = "<think>\nLet me think.\n</think>\n\n"
_ALTERNATE = ("tool", "tool as text", "first")

_DEEPSEEK = "<｜end▁of▁sentence｜>"
_COHERE = "<|END_OF_TURN_TOKEN|>"
_CHATML, _LLAMA, _EOS = "<|im_end|>", "<|eot_id|>", "</s>"
_GEMMA4 = Turns("<turn|>", call=_GEMMA_CALL, call_end="<|tool_response>")
_GEMMA4_THINKS = replace(_GEMMA4, thought=_GEMMA_THOUGHT)
_NEMOTRON = Turns(_CHATML, head="</think>", call=f"</think>\n{_XML_CALL}\n")
_QWEN = Turns(_CHATML, call=_QWEN_CALL)
_PLAIN = Turns(_CHATML, call=_JSON_CALL)
_QWEN3_5 = Turns(
    _CHATML, last_head=_NO_THOUGHT, call=_NO_THOUGHT + _XML_CALL, thought=_QWEN_THOUGHT
)

UNMARKED = {
    "cohere": Turns(_COHERE, refused=_ALTERNATE),
    "cohere2": Turns(f"<|END_RESPONSE|>{_COHERE}", refused=_ALTERNATE),
    "deepseek_r1_distill": Turns(_DEEPSEEK, call=_R1_CALL, call_end=""),
    "deepseekv3": Turns(_DEEPSEEK, call=f"{_R1_CALL}<｜tool▁calls▁end｜>"),
    "gemma": Turns("<end_of_turn>", refused=(*_ALTERNATE, "system", "call")),
    "gemma3": Turns("<end_of_turn>", refused=_ALTERNATE),
    **dict.fromkeys(("gemma4", "gemma4_v3", "gemma4_v4"), _GEMMA4),
    "gemma4_v2": Turns("<turn|>", call=_GEMMA_CALL),
    **dict.fromkeys(("gemma4_v5", "diffusion_gemma"), _GEMMA4_THINKS),
    "glm4moe": Turns(
        *("<|user|>", "<think></think>\n"),
        **{"call": _GLM_CALL, "call_end": "<|observation|>"},
        thought="<think>Let me think.</think>\n",
    ),
    "gptoss": Turns(
        *("<|end|>", "<|channel|>final<|message|>", "<|return|>"),
        **{"call": _OSS_CALL, "call_end": "<|call|>"},
        thought=_OSS_THOUGHT + "<|channel|>final<|message|>",
    ),
    **dict.fromkeys(("idefics3", "smolvlm"), Turns("<end_of_utterance>", call=_JSON_CALL)),
    "lfm2": _PLAIN,
    "lfm2_v2": Turns(
        _CHATML, call="<|tool_call_start|>[get_weather(city='Paris')]<|tool_call_end|>"
    ),
    "llama3": Turns(_LLAMA, call=_JSON_CALL),
    **dict.fromkeys(("llama3_1", "llama3_2"), Turns(_LLAMA, call=_LLAMA_CALL)),
    "llava_next": Turns(_EOS),
    "muse_glimmer": Turns("<|eot|>", "to=user<|message|>", call=_MUSE_CALL, thought=_MUSE_THOUGHT),
    **dict.fromkeys(
        ("nemotron_3_5_lightning", "nemotron_3_ultra"),
        replace(_NEMOTRON, thought="Let me think.</think>"),
    ),
    **dict.fromkeys(
        ("nemotron_3_nano", "nemotron_3_super"),
        replace(_NEMOTRON, thought="Let me think.\n</think>\n"),
    ),
    **dict.fromkeys(("phi3", "phi3_5"), Turns("<|end|>")),
    **dict.fromkeys(("qwen2_5", "qwen3_instruct_2507", "qwen3_vl"), _QWEN),
    "qwen2_5_vl": _PLAIN,
    "qwen3": replace(
        _QWEN,
        last_head=_NO_THOUGHT,
        last_call=_NO_THOUGHT + _QWEN_CALL,
        thought=_QWEN_THOUGHT,
    ),
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), _QWEN3_5),
    "qwen3_8": Turns(
        *(_CHATML, "</think>\n\n"),
        call=f"</think>\n\n{_XML_CALL}",
        thought=_QWEN_THOUGHT.removeprefix("<think>\n"),
    ),
    # Of chat_templates/.
    "alpaca": Turns(_EOS, call=_JSON_CALL),
    "baichuan2": Turns("<reserved_106>", call=None),
    "chatglm3": Turns("<|user|>", call=_JSON_CALL, call_end="<|tool|>"),
    "command_r": Turns(f"<|END_RESPONSE|>{_COHERE}", "<|START_RESPONSE|>"),
    "exaone": Turns("[|endofturn|]", call=_JSON_CALL),
    "falcon3": Turns(_EOS, call=f"<tool_call>\n{_FALCON_CALL}\n</tool_call>"),
    "granite": Turns("<|end_of_text|>", call=_JSON_CALL),
    "hunyuan": Turns("<|eos|>"),
    **dict.fromkeys(("internlm2", "yi", "phi4", "qwen1_5", "qwen1_5_first"), _PLAIN),
    "kimi_k2": Turns(_CHATML, refused=("call",)),  # prints a call's id in place of its name
    "llama2": Turns(f" {_EOS}", refused=_ALTERNATE),
    "minimax": Turns("<end_of_sentence>", call=_JSON_CALL),
    "mistral_nemo": Turns(_EOS, call=f"[TOOL_CALLS]{_MISTRAL_CALL}", refused=("first",)),
    "mistral_v1": Turns(_EOS, refused=(*_ALTERNATE, "system", "call")),
    "mistral_v3": Turns(_EOS, call=f"[TOOL_CALLS] {_MISTRAL_CALL}", refused=("first",)),
    "olmo2": Turns(_EOS),
    "reasoning_dropped": _PLAIN,
    "seed_oss": Turns(_EOS, call=_JSON_CALL, thought="<seed:think>Let me think.</seed:think>"),
    **dict.fromkeys(("vicuna", "zephyr"), Turns(_EOS)),
}


def _unmarked(name: str) -> str:
    if name not in SOURCES and name not in OTHERS:
        pytest.skip("TRL is not installed")
    return OTHERS.get(name) or SOURCES[name] + "{# other #}"


@pytest.mark.parametrize("name", UNMARKED)
def test_turns_are_found_where_nobody_marked_them(folder: Path, name: str) -> None:
    tokenizer = _tokenizer(folder, _unmarked(name))
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
    assert {*SOURCES, *OTHERS} - marked == set(UNMARKED) or not SOURCES


@pytest.mark.parametrize("name", ["chatglm3", "glm4moe", "gptoss", "qwen2_5"])
def test_empty_turns_are_not_taken_for_the_one_before_them(folder: Path, name: str) -> None:
    tokenizer = _tokenizer(folder, _unmarked(name))
    empty = {"role": "tool", "content": "", "tool_call_id": _CALL_ID, "name": "get_weather"}
    call = KINDS["tool"]["messages"][1]
    turns = [_user("What?"), call, empty, _user(""), _assistant("It is so."), _user("")]
    ids, weights = ChatRenderer(tokenizer).render(parse_record({"messages": turns}))
    one = UNMARKED[name]
    call_text, _ = one.expected("tool") or ("", "")
    assert _learnt(tokenizer, ids, weights) == [call_text, f"{one.head}It is so.{one.end}"]


def test_a_call_that_is_printed_by_its_id(folder: Path) -> None:
    tokenizer = _tokenizer(folder, OTHERS["kimi_k2"])
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
    kinds = [kind for kind in KINDS if kind not in ("call", "loss")]
    lines = [
        f"| template | what is learnt | {' | '.join(kinds)} |",
        f"|---|---|{'---|' * len(kinds)}",
    ]
    for name in sorted({*TRAINED, *UNMARKED}):
        renderer = ChatRenderer(_tokenizer(folder, OTHERS.get(name) or SOURCES[name]))
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
