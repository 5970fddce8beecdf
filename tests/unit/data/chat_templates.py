"""Common kinds of chat templates with generation blocks; `unmarked` removes the blocks.

With the blocks, transformers returns the mask of the assistant's tokens, with which the tests compare ours.
"""

import re

CHATML = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}\
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}\
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}{% for message in messages %}\
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}\
{%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}\
{%- else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# No generation prompt, the system text inside the first user turn, bos before each user turn.
LLAMA2 = """\
{%- if messages[0].role == 'system' %}{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}\
{%- set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}\
{%- for message in turns %}\
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{- raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}\
{%- if message.role == 'user' %}\
{{- bos_token + '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}\
{%- else %}{% generation %}{{ ' ' + message.content + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"""

# No special tokens: a line feed ends a turn, and tokens cross the boundaries of turns.
WORDS = """\
{%- for message in messages %}{{ message.role + ':' }}\
{%- if message.role == 'assistant' %}{% generation %}{{ ' ' + message.content + '\\n' }}{% endgeneration %}\
{%- else %}{{ ' ' + message.content + '\\n' }}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""

# A turn ends with a space, which can be part of the next turn's first token.
SPACES = """\
{%- for message in messages %}{{ message.role + ':' }}\
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + ' ' }}{% endgeneration %}\
{%- else %}{{ message.content + ' ' }}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""

# Like reasoning models, shows thoughts only in the last turn: a rendered prefix is not a prefix of the conversation.
FORGETTING = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}\
{%- if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}\
{%- else %}{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

ALL = {"chatml": CHATML, "llama3": LLAMA3, "llama2": LLAMA2, "words": WORDS, "spaces": SPACES}
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def unmarked(template: str) -> str:
    """The same template without its generation blocks."""
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
