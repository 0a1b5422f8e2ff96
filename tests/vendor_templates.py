"""Chat templates in the shapes of models for which TRL has none, none of them marked."""

from __future__ import annotations

_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
)
_SYSTEM_APART = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
)
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful assistant<|im_end|>\n' }}{% endif %}"
)
_MISTRAL_V3 = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for m in loop_messages %}
    {%- if not (m.role == "tool" or (m.tool_calls is defined and m.tool_calls is not none)) %}
        {%- if (m["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in loop_messages %}
    {%- if m["role"] == "user" %}
        {%- if tools is not none and m == user_messages[-1] %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + m["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + m["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in m.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should have length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif m["role"] == "assistant" %}
        {{- " " + m["content"] | trim + eos_token }}
    {%- elif m["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' }}
        {{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
_KIMI = """\
{%- macro content(m) -%}{%- set c = m.get('content') -%}
{%- if c is string -%}{{ c }}{%- elif c is not none -%}
{%- for one in c -%}{{ one['text'] }}{%- endfor -%}{%- endif -%}{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}
  <|im_system|>system<|im_middle|>You are Kimi.<|im_end|>
  {%- endif -%}
  {%- if m['role'] == 'user' -%}<|im_user|>user<|im_middle|>
  {%- elif m['role'] == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>
  {%- else -%}<|im_system|>{{ m['role'] }}<|im_middle|>{%- endif -%}
  {%- if m['role'] == 'assistant' and m.get('tool_calls') -%}
    {{ content(m) }}<|tool_calls_section_begin|>
    {%- for call in m['tool_calls'] -%}
    <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
    {%- if call['function']['arguments'] is string -%}{{ call['function']['arguments'] }}
    {%- else -%}{{ call['function']['arguments'] | tojson }}{%- endif -%}<|tool_call_end|>
    {%- endfor -%}<|tool_calls_section_end|>
  {%- elif m['role'] == 'tool' -%}## Return of {{ m.tool_call_id }}
{{ content(m) }}
  {%- else -%}{{ content(m) }}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
_FALCON3 = """\
{%- if tools %}{{- '<|system|>\n' + (tools | tojson) + '\n' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'system' %}{{- '<|system|>\n' + m.content + '\n' }}
  {%- elif m.role == 'user' %}{{- '<|user|>\n' + m.content + '\n' }}
  {%- elif m.role == 'assistant' %}
    {%- if m.content %}{{- '<|assistant|>\n' + m.content }}{%- endif %}
    {%- if m.tool_calls %}
      {{- '\n<tool_call>\n' + (m.tool_calls | tojson) + '\n</tool_call>' }}
    {%- endif %}
    {{- eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}
  {%- elif m.role == 'tool' %}
    {{- '<|assistant|>\n<tool_response>\n' + m.content + '\n</tool_response>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}
"""

TEMPLATES = {
    "alpaca": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
        "{% elif m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}{% else %}"
        "{{ '### Response:\n' + m.content + eos_token + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
    ),
    "baichuan2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<reserved_106>' + m.content }}"
        "{% elif m.role == 'assistant' %}{{ '<reserved_107>' + m.content }}"
        "{% elif m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<reserved_107>' }}{% endif %}"
    ),
    "chatglm3": (
        "{{ '[gMASK]<sop>' }}{% for m in messages %}{{ '<|' + m.role + '|>\n ' + m.content }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{# <|user|> #}"
    ),
    "command_r": (
        "{{ bos_token }}" + _SYSTEM_APART + "{% if system %}"
        "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system + '<|END_OF_TURN_TOKEN|>' }}"
        "{% endif %}{% for m in rest %}{% if m.role == 'user' %}{{ '<|START_OF_TURN_TOKEN|>"
        "<|USER_TOKEN|>' + m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
        "{% elif m.role == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        "<|START_RESPONSE|>' + m.content.strip() + '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
    ),
    "exaone": (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
        "{{ '[|system|][|endofturn|]\n' }}{% endif %}{{ '[|' + m.role + '|]' + m.content }}"
        "{% if m.role == 'user' %}{{ '\n' }}{% else %}{{ '[|endofturn|]\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}"
    ),
    "falcon3": _FALCON3,
    "granite": (
        _SYSTEM_APART + "{{ '<|start_of_role|>system<|end_of_role|>' + (system or 'Today is ' + "
        "strftime_now('%B %d, %Y')) + '<|end_of_text|>\n' }}{% if tools %}{{ '<|start_of_role|>"
        "tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\n' }}{% endif %}"
        "{% for m in rest %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + "
        "'<|end_of_text|>\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
    ),
    "hunyuan": (
        "{{ '<|startoftext|>' }}" + _SYSTEM_APART + "{% if system %}{{ system + '<|extra_4|>' }}"
        "{% endif %}{% for m in rest %}{% if m.role == 'user' %}{% if loop.index0 != 0 %}"
        "{{ '<|startoftext|>' }}{% endif %}{{ m.content + '<|extra_0|>' }}"
        "{% elif m.role == 'assistant' %}{{ m.content + '<|eos|>' }}{% endif %}{% endfor %}"
    ),
    "internlm2": "{{ bos_token }}" + _CHATML,
    "kimi_k2": _KIMI,
    "llama2": (
        _SYSTEM_APART + "{% for m in rest %}" + _ALTERNATE + "{% if loop.first and system %}"
        "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content %}{% else %}"
        "{% set content = m.content %}{% endif %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}"
        "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "minimax": (
        "{% for m in messages %}{{ '<beginning_of_sentence>' + m.role + '\n' }}"
        "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }}{% endfor %}"
        "{{ '<end_of_sentence>\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<beginning_of_sentence>assistant\n' }}{% endif %}"
    ),
    "mistral_v1": (
        "{{ bos_token }}{% for m in messages %}" + _ALTERNATE + "{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "mistral_v3": _MISTRAL_V3,
    "mistral_nemo": _MISTRAL_V3.replace('" " + m["content"] | trim', 'm["content"]')
    .replace("[INST] ", "[INST]")
    .replace("[TOOL_CALLS] ", "[TOOL_CALLS]")
    .replace("_TOOLS] ", "_TOOLS]"),
    "olmo2": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n'"
        " + m.content + eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}"
        "{% elif m.role in ['system', 'user'] %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "phi4": _CHATML.replace("<|im_end|>\n", "<|im_end|>").replace("\n", "<|im_sep|>"),
    "qwen1_5": _QWEN_SYSTEM + _CHATML.removeprefix("{% for m in messages %}"),
    # Its first version: the last turn's end is only there where it goes on.
    "qwen1_5_first": (
        _QWEN_SYSTEM + "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if not loop.last or add_generation_prompt %}{{ '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "reasoning_dropped": (
        "{% for m in messages %}{% set content = m.content %}"
        "{% if m.role == 'assistant' and not loop.last and '</think>' in content %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
    "seed_oss": (
        "{% for m in messages %}{{ bos_token + m.role + '\n' }}{% if m.reasoning_content %}"
        "{{ '<seed:think>' + m.reasoning_content | trim + '</seed:think>' }}{% endif %}"
        "{{ m.content | trim + eos_token }}{% endfor %}{% if add_generation_prompt %}"
        "{{ bos_token + 'assistant\n' }}{% endif %}"
    ),
    "vicuna": (
        _SYSTEM_APART + "{{ system or 'A chat between a user and an assistant.' }}"
        "{% for m in rest %}{% if m.role == 'user' %}{{ ' USER: ' + m.content.strip() }}"
        "{% elif m.role == 'assistant' %}{{ ' ASSISTANT: ' + m.content.strip() + eos_token }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
    ),
    "yi": _CHATML,
    "zephyr": (
        "{% for m in messages %}\n{% if m.role == 'user' %}\n{{ '<|user|>\n' + m.content + "
        "eos_token }}\n{% elif m.role == 'system' %}\n{{ '<|system|>\n' + m.content + eos_token "
        "}}\n{% elif m.role == 'assistant' %}\n{{ '<|assistant|>\n' + m.content + eos_token }}\n"
        "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n"
        "{% endif %}\n{% endfor %}"
    ),
}
