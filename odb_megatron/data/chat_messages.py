"""A conversation in the form that HF chat templates take, adapted to what a template prints.

Pure: no files, no tokenizer. Must not render text or drop a part of a message.
"""

from __future__ import annotations

import json
import re

from odb_megatron.data.chat_record import Conversation, Message

__all__ = ["template_messages"]


def template_messages(
    conversation: Conversation, source: str
) -> tuple[list[dict[str, object]], list[object] | None]:
    """Messages and tools as a chat template takes them.

    What a template would leave out silently is put where it is printed. Tools, where the template
    does not mention `tools`: JSON lines at the end of the system message, or in one put before the
    first turn. Tool calls, where it does not mention `tool_calls`: JSON lines at the end of the
    assistant's text. The role `developer`, where it is not mentioned: `system`.

    Args:
        conversation: the turns.
        source: the template.

    Returns:
        the messages, and the tools or None if there are none left to pass.

    Raises:
        ValueError: a message has reasoning, for which the template has no place.
    """
    messages = [_template_message(m, source) for m in conversation.messages]
    tools: list[object] = [dict(tool) for tool in conversation.tools]
    if not tools or _mentions(source, "tools"):
        return messages, tools or None
    listed = "\n".join(["# Tools", *(json.dumps(tool, ensure_ascii=False) for tool in tools)])
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": listed}, *messages], None
    content = f"{messages[0]['content']}\n\n{listed}"
    return [{**messages[0], "content": content}, *messages[1:]], None


def _template_message(message: Message, source: str) -> dict[str, object]:
    role = message.role
    if role == "developer" and not _mentions(source, "developer"):
        role = "system"
    content = message.content
    result: dict[str, object] = {"role": role}
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    if calls and not _mentions(source, "tool_calls"):
        lines = [json.dumps(call, ensure_ascii=False) for call in calls]
        content = "\n".join([content, *lines] if content else lines)
    elif calls:
        result["tool_calls"] = [
            {
                "type": "function",
                "function": call,
                **({"id": given.call_id} if given.call_id else {}),
            }
            for call, given in zip(calls, message.tool_calls, strict=True)
        ]
    if message.reasoning:
        if not _mentions(source, "reasoning_content|thinking|reasoning"):
            raise ValueError(
                "a message has reasoning_content, for which the chat template has no place; use a "
                "tokenizer whose template prints it, or write it into the content"
            )
        result |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    return {**result, "content": content, **{k: v for k, v in named.items() if v is not None}}


def _mentions(source: str, words: str) -> bool:
    return re.search(rf"\b(?:{words})\b", source) is not None
