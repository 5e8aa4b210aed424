"""Chat templates in the styles that models come with."""

from __future__ import annotations

CHATML = (
    "{%- for message in messages %}<|im_start|>{{ message.role + '\n' }}"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif -%}"
    "<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Content is concatenated and trimmed; prints a list as Python would.
TRIMMING = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' ~ message['role'] ~ '\n\n' ~ message['content'] | trim ~ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
#: Content must be a list of parts.
PARTS_ONLY = (
    "{% for message in messages %}{{ message.role }}:"
    "{% for part in message.content %}{% if part.type == 'text' %} {{ part.text }}{% endif %}{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
#: Refuses what it was not trained on.
STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{{ '[' ~ message.role | upper ~ ']' ~ message['content'] }}{% endfor %}"
)
TOOLS = (
    "{%- if tools %}tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}{{ '\n' }}{% endif -%}"
    "{%- for message in messages %}{{ message.role }}: {{ message.content }}"
    "{%- if message.tool_calls %}{% for call in message.tool_calls %} call {{ call.function.name }}("
    "{%- for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }};{% endfor %})"
    "{%- endfor %}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %} <quick>{% endif %}{% endif %}"
)
ALL = {"chatml": CHATML, "trimming": TRIMMING, "parts": PARTS_ONLY, "strict": STRICT, "tools": TOOLS}
