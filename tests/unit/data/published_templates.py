"""Chat templates that render what those of published models do, written shorter: without images and without checks of
the input. `test_published_templates.py` compares them with the published texts that trl contains."""

from dataclasses import dataclass

CHATML = """\
{%- for message in messages %}\
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{%- for message in messages %}{{ bos_token if loop.first }}\
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# A system turn is always there, tools are in the first user turn, a tool's answer has the role ipython.
LLAMA3_1 = """\
{%- macro turn(role, text) %}\
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + text + '<|eot_id|>' }}{% endmacro %}\
{%- set system = '' %}\
{%- if messages[0].role == 'system' %}\
{%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}{% endif %}\
{{- bos_token + turn('system', ('Environment: ipython\\n' if tools is not none else '')\
 + 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' + system) }}\
{%- if tools is not none %}{%- set described -%}\
Given the following functions, please respond with a JSON for a function call with its proper arguments that best \
answers the given prompt.{{ '\\n\\n' }}Respond in the format {"name": function name, "parameters": dictionary of \
argument name and its value}.Do not use variables.{{ '\\n\\n' }}\
{%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}{%- endset %}\
{{- turn('user', described + messages[0].content | trim) }}{% set messages = messages[1:] %}{% endif %}\
{%- for message in messages %}\
{%- if 'tool_calls' in message %}{% set call = message.tool_calls[0].function %}\
{{- turn('assistant', '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}') }}\
{%- elif message.role == 'tool' %}{{ turn('ipython', message.content | tojson) }}\
{%- else %}{{ turn(message.role, message.content | trim) }}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_QWEN_TOOLS = """\
# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with function \
signatures within <tools></tools> XML tags:\\n<tools>"""
_QWEN_CALLS = """\
\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n\
</tool_call>"""
# Tools' answers that follow each other share one user turn.
_QWEN_TOOL_ANSWER = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}\
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}\
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"""
_QWEN_PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

QWEN2_5 = (
    """\
{%- set system = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}\
{%- if tools %}{% set list %}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{% endset %}\
{%- set system = system + '\\n\\n"""
    + _QWEN_TOOLS
    + "' + list + '"
    + _QWEN_CALLS
    + """' %}{% endif %}\
{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}\
{%- for message in messages %}\
{%- if message.role == 'tool' %}"""
    + _QWEN_TOOL_ANSWER
    + """\
{%- elif message.role == 'assistant' and message.tool_calls %}\
{{- '<|im_start|>assistant' + ('\\n' + message.content if message.content else '') }}\
{%- for call in message.tool_calls %}{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}\
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}\
{%- elif message.role != 'system' or not loop.first %}\
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"""
    + _QWEN_PROMPT
)

_QWEN3_SYSTEM = (
    """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}\
{%- if tools %}{% set list %}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{% endset %}\
{%- set system = (system + '\\n\\n' if messages[0].role == 'system' else '') + '"""
    + _QWEN_TOOLS
    + "' + list + '"
    + _QWEN_CALLS
    + """' %}{% endif %}\
{%- if system %}{{ '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}{% endif %}"""
)

# Thoughts are shown only after the last question, where the last turn always has a block for them.
QWEN3 = (
    _QWEN3_SYSTEM
    + """\
{%- set asked = namespace(last=messages|length - 1) %}\
{%- for message in messages %}{% if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}\
{%- for message in messages %}\
{%- if message.role == 'tool' %}"""
    + _QWEN_TOOL_ANSWER
    + """\
{%- elif message.role == 'assistant' %}\
{%- set content = message.content or '' %}{% set thoughts = message.reasoning_content or '' %}\
{%- if not thoughts and '</think>' in content %}\
{%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}\
{{- '<|im_start|>assistant\\n' }}\
{%- if loop.index0 > asked.last and (loop.last or thoughts) %}\
{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}\
{%- else %}{{ content }}{% endif %}\
{%- for call in message.tool_calls or [] %}{{ '\\n' if content or not loop.first }}\
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}\
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}\
{%- elif message.role != 'system' or not loop.first %}\
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"""
    + _QWEN_PROMPT
)

# Of Qwen3-Next and Qwen3 2507, without thoughts.
QWEN3_INSTRUCT = (
    _QWEN3_SYSTEM
    + """\
{%- for message in messages %}\
{%- if message.role == 'tool' %}"""
    + _QWEN_TOOL_ANSWER
    + """\
{%- elif message.role != 'system' or not loop.first %}\
{{- '<|im_start|>' + message.role + '\\n' + message.content }}\
{%- for call in message.tool_calls or [] %}{{ '\\n' if message.content or not loop.first }}\
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}\
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"""
    + _QWEN_PROMPT
)

# Calls are XML; turns after the last question have a block for thoughts, which the prompt begins.
QWEN3_5 = (
    """\
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}\
{%- if tools %}{% set list %}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{% endset %}\
{%- set system = '# Tools\\n\\nYou have access to the following functions:\\n\\n<tools>' + list + '\\n</tools>\\n\\n\
If you choose to call a function ONLY reply in the following format with NO suffix:\\n\\n<tool_call>\\n\
<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n\
<parameter=example_parameter_2>\\nThis is the value for the second parameter\\nthat can span\\nmultiple lines\\n\
</parameter>\\n</function>\\n</tool_call>\\n\\n<IMPORTANT>\\nReminder:\\n- Function calls MUST follow the specified \
format: an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags\\n\
- Required parameters MUST be specified\\n- You may provide optional reasoning for your function call in natural \
language BEFORE the function call, but NOT after\\n- If there is no function call available, answer the question like \
normal with your current knowledge and do not tell the user about function calls\\n</IMPORTANT>\
' + ('\\n\\n' + system if system else '') %}{% endif %}\
{%- if system %}{{ '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}{% endif %}\
{%- set asked = namespace(last=-1) %}\
{%- for message in messages %}{% if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}\
{%- for message in messages %}{% set content = message.content | trim %}\
{%- if message.role == 'tool' %}"""
    + _QWEN_TOOL_ANSWER
    + """\
{%- elif message.role == 'assistant' %}{% set thoughts = '' %}\
{%- if '</think>' in content %}\
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1] | trim %}\
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}\
{{- '<|im_start|>assistant\\n' }}\
{%- if loop.index0 > asked.last %}{{ '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}{% endif %}{{ content }}\
{%- for call in message.tool_calls or [] %}{{ '\\n' if not loop.first else '\\n\\n' if content }}\
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}\
{%- for name, value in call.function.arguments | items %}\
{{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}{% endfor %}\
{{- '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}\
{%- elif message.role == 'user' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
)

# No generation prompt; tools stand before the last question, the system's text in a question at the end only.
MISTRAL = """\
{%- if messages[0].role == 'system' %}\
{%- set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}\
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list %}\
{{- bos_token }}\
{%- for message in messages %}\
{%- if message.role == 'user' %}\
{%- if tools and message == questions[-1] %}\
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}\
{{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}\
{%- elif message.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}\
{%- for call in message.tool_calls %}{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}\
{{- ', ' if not loop.last }}{% endfor %}{{ ']' + eos_token }}\
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}\
{%- else %}{{ '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}\
{{- '"}[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"""

# The roles are user and model; Gemma 3 puts the system's text before the first question.
GEMMA = """\
{{- bos_token }}{% set prefix = '' %}\
{%- if messages[0].role == 'system' %}\
{%- set prefix = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}\
{%- for message in messages %}\
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}\
{{- (prefix if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# The generation prompt opens a thought, which no turn of a conversation shows; after a tool's answer there is none.
DEEPSEEK = """\
{{- bos_token }}\
{%- for message in messages %}{% if message.role == 'system' %}{{ message.content }}{% endif %}{% endfor %}\
{%- set state = namespace(tool=false, called=false, answered=false) %}\
{%- for message in messages %}\
{%- if message.role == 'user' %}{% set state.tool = false %}{{ '<｜User｜>' + message.content }}\
{%- elif message.role == 'tool' %}\
{{- '' if state.answered else '<｜tool▁outputs▁begin｜>' }}{% set state.tool = true %}{% set state.answered = true %}\
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}\
{%- elif message.role == 'assistant' and 'tool_calls' in message %}{% set state.tool = false %}\
{%- for call in message.tool_calls %}\
{{- '\\n' if state.called else '<｜Assistant｜>' + message.content + '<｜tool▁calls▁begin｜>' }}\
{%- set state.called = true %}\
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}\
{{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}\
{%- endfor %}{{ '<｜tool▁calls▁end｜>' + eos_token }}\
{%- elif message.role == 'assistant' %}\
{{- '<｜tool▁outputs▁end｜>' if state.tool else '<｜Assistant｜>' }}\
{{- message.content if state.tool else message.content.split('</think>')[-1] }}\
{{- eos_token }}{% set state.tool = false %}{% endif %}{% endfor %}\
{{- '<｜tool▁outputs▁end｜>' if state.tool }}\
{%- if add_generation_prompt and not state.tool %}{{ PROMPT }}{% endif %}"""

# No token closes a turn. Thoughts are shown after the last question only; each answer has a block for them.
GLM4 = """\
[gMASK]<sop>\
{%- if tools %}{{ '<|system|>\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n\
You are provided with function signatures within <tools></tools> XML tags:\\n<tools>\\n' }}\
{%- for tool in tools %}{{ tool | tojson(ensure_ascii=False) + '\\n' }}{% endfor %}\
{{- '</tools>\\n\\nFor each function call, output the function name and arguments within the following XML format:\\n\
<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value>\\n\
<arg_key>{arg-key-2}</arg_key>\\n<arg_value>{arg-value-2}</arg_value>\\n...\\n</tool_call>' }}{% endif %}\
{%- set asked = namespace(last=-1) %}\
{%- for message in messages %}{% if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}\
{%- for message in messages %}\
{%- if message.role == 'tool' %}\
{{- '<|observation|>' if loop.first or messages[loop.index0 - 1].role != 'tool' }}\
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}\
{%- elif message.role == 'assistant' %}\
{%- set thoughts, content = '', message.content %}\
{%- if '</think>' in content %}\
{%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}\
{{- '<|assistant|>\\n<think>' + (thoughts.strip() if loop.index0 > asked.last else '') + '</think>' }}\
{{- '\\n' + content.strip() if content.strip() }}\
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name + '\\n' }}\
{%- for key, value in call.function.arguments.items() %}\
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + value + '</arg_value>\\n' }}{% endfor %}\
{{- '</tool_call>' }}{% endfor %}\
{%- else %}{{ '<|' + message.role + '|>\\n' + message.content }}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# As SmolLM3's: a system turn is always there, and generation blocks contain the whole turn of the assistant.
SMOLLM3 = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}\
{{- '<|im_start|>system\\n## Metadata\\n\\nKnowledge Cutoff Date: June 2025\\nReasoning Mode: /think\\n\\n' }}\
{{- '## Custom Instructions\\n\\n' + system + '\\n\\n<|im_end|>\\n' }}\
{%- for message in messages %}\
{%- if message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}\
{%- elif message.role == 'assistant' %}{% generation %}\
{{- '<|im_start|>assistant\\n' + message.content.lstrip('\\n') + '<|im_end|>\\n' }}{% endgeneration %}\
{%- elif message.role == 'tool' %}\
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As Kimi K2's: the tokens of a turn name its role, and a default system turn comes first.
KIMI = """\
{%- if messages[0].role != 'system' %}\
{{- '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>' }}{% endif %}\
{%- for message in messages %}\
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + message.content + '<|im_end|>' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

# As Phi-4-mini's: the token that begins a turn is its role, and the eos token ends the conversation.
PHI4_MINI = """\
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

# As Ministral 3's: the system's text has tokens of its own, and no generation prompt is needed.
MINISTRAL3 = """\
{{- bos_token }}\
{%- for message in messages %}\
{%- if message.role == 'system' %}{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}\
{%- elif message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}\
{%- else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"""

# As Seed-OSS's: every turn begins with the bos token and ends with the eos token.
SEED_OSS = """\
{%- for message in messages %}\
{{- bos_token + message.role + '\\n' + message.content + eos_token }}{% endfor %}\
{%- if add_generation_prompt %}{{ bos_token + 'assistant\\n' }}{% endif %}"""


# The last turn ends with another token. Its thoughts are shown; of a call's turn, only until an answer follows.
HARMONY = """\
{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\n\
Knowledge cutoff: 2024-06\\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\\n\\nReasoning: medium\\n\\n\
# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}\
{{- "\\nCalls to these tools must go to the commentary channel: 'functions'." if tools }}{{ '<|end|>' }}\
{%- set system = '' %}\
{%- if messages[0].role == 'system' %}\
{%- set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}\
{%- if system or tools %}{{ '<|start|>developer<|message|>' }}\
{{- '# Instructions\\n\\n' + system + '\\n\\n' if system }}\
{%- if tools %}{{ '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}\
{%- for tool in tools %}{{ '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: {\\n' }}\
{%- for name in tool.function.parameters.properties %}{{ name + '?: string,\\n' }}{% endfor %}\
{{- '}) => any;\\n\\n' }}{% endfor %}{{ '} // namespace functions' }}{% endif %}{{ '<|end|>' }}{% endif %}\
{%- set called = namespace(name=none) %}\
{%- for message in messages %}\
{%- set is_answer = message.role == 'assistant' and message.tool_calls is not defined %}\
{%- if message.role == 'assistant' %}\
{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') %}\
{%- set answered = later | selectattr('tool_calls', 'undefined') | list %}\
{%- if message.thinking is defined and (loop.last and not add_generation_prompt if is_answer else not answered) %}\
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}\
{%- if is_answer %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}\
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}\
{%- else %}{% set called.name = message.tool_calls[0].function.name %}\
{{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}\
{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}{% endif %}\
{%- elif message.role == 'tool' %}{{ '<|start|>functions.' + called.name }}\
{{- ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}\
{%- else %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# As OLMo 2's: the token that begins the text also ends every turn of the assistant.
OLMO2 = """\
{{- bos_token }}\
{%- for message in messages %}\
{%- if message.role == 'assistant' %}\
{{- '<|assistant|>\\n' + message.content + eos_token + ('' if loop.last else '\\n') }}\
{%- else %}{{ '<|' + message.role + '|>\\n' + message.content + '\\n' }}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

# As OLMo 3's: calls and answers of tools are text of turns; the last turn of the assistant ends with the eos token.
OLMO3 = """\
{%- if messages[0].role != 'system' %}\
{{- '<|im_start|>system\\nYou are a helpful function-calling AI assistant. ' }}\
{{- 'You do not currently have access to any functions. <functions></functions><|im_end|>\\n' }}{% endif %}\
{%- for message in messages %}\
{%- if message.role == 'system' %}{{ '<|im_start|>system\\n' + message.content }}\
{{- ' <functions>' + (tools | tojson if tools else '') + '</functions><|im_end|>\\n' }}\
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + message.content }}\
{%- if message.tool_calls %}{{ '<function_calls>' }}\
{%- for call in message.tool_calls %}{{ call.function.name + '(' }}\
{%- for key, value in call.function.arguments.items() %}{{ key + '=' + value | tojson }}{% endfor %}{{ ')' }}\
{%- endfor %}{{ '</function_calls>' }}{% endif %}\
{{- '<|im_end|>\\n' if not loop.last else eos_token }}\
{%- else %}{{ '<|im_start|>' + ('environment' if message.role == 'tool' else message.role) + '\\n' }}\
{{- message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As MiniMax-M2's: a system turn is always there. The generation prompt opens the thoughts; earlier turns show none.
MINIMAX_M2 = """\
{{- ']~!b[]~b]system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.') }}\
{%- if tools %}{{ '\\n\\n# Tools\\n<tools>\\n' }}\
{%- for tool in tools %}{{ '<tool>' + tool.function | tojson + '</tool>\\n' }}{% endfor %}{{ '</tools>' }}{% endif %}\
{{- '[e~[\\n' }}\
{%- set asked = namespace(last=-1) %}\
{%- for message in messages %}{% if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}\
{%- for message in messages %}\
{%- if message.role == 'assistant' %}\
{%- set thoughts, content = '', message.content %}\
{%- if '</think>' in content %}\
{%- set thoughts = content.split('</think>')[0].strip('\\n').split('<think>')[-1].strip('\\n') %}\
{%- set content = content.split('</think>')[-1].strip('\\n') %}{% endif %}\
{{- ']~b]ai\\n' }}\
{%- if thoughts and loop.index0 > asked.last %}{{ '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}{% endif %}\
{{- content }}\
{%- if message.tool_calls %}{{ '\\n<minimax:tool_call>\\n' }}\
{%- for call in message.tool_calls %}{{ '<invoke name="' + call.function.name + '">\\n' }}\
{%- for key, value in call.function.arguments.items() %}\
{{- '<parameter name="' + key + '">' + value + '</parameter>\\n' }}{% endfor %}{{ '</invoke>\\n' }}{% endfor %}\
{{- '</minimax:tool_call>' }}{% endif %}{{ '[e~[\\n' }}\
{%- elif message.role == 'tool' %}{{ ']~b]tool\\n<response>' + message.content + '</response>[e~[\\n' }}\
{%- elif message.role == 'user' %}{{ ']~b]user\\n' + message.content + '[e~[\\n' }}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A template, its special tokens, and what it supports."""

    template: str
    special: tuple[str, ...]
    """Added as special tokens, the end of a turn first."""
    bos: str = "<s>"
    eos: str = "</s>"
    published: str = ""
    """Name of the published template in trl; empty: it has none."""
    system: bool = True
    tools: bool = False
    arguments_as_text: bool = False
    """The arguments of a tool call must be a string."""


_GLM4_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "[gMASK]", "<sop>")
_CHATML_TOKENS = ("<|im_end|>", "<|im_start|>")
_LLAMA_TOKENS = ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
_DEEPSEEK_TOOLS = [
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *(f"<｜tool▁{name}｜>" for name in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")),
]
_DEEPSEEK_TOKENS = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", *_DEEPSEEK_TOOLS)
_MISTRAL_TOKENS = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
_DEEPSEEK = {
    "special": _DEEPSEEK_TOKENS,
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "tools": True,
    "arguments_as_text": True,
}

FAMILIES = {
    "chatml": Family(CHATML, _CHATML_TOKENS),
    "llama3": Family(LLAMA3, _LLAMA_TOKENS, bos="<|begin_of_text|>", eos="<|eot_id|>", published="llama3"),
    "llama3.1": Family(
        LLAMA3_1, _LLAMA_TOKENS, bos="<|begin_of_text|>", eos="<|eot_id|>", published="llama3_1", tools=True
    ),
    "qwen2.5": Family(QWEN2_5, _CHATML_TOKENS, eos="<|im_end|>", published="qwen2_5", tools=True),
    "qwen3": Family(QWEN3, _CHATML_TOKENS, eos="<|im_end|>", published="qwen3", tools=True),
    "qwen3-next": Family(QWEN3_INSTRUCT, _CHATML_TOKENS, eos="<|im_end|>", published="qwen3_instruct_2507", tools=True),
    "qwen3.5": Family(QWEN3_5, _CHATML_TOKENS, eos="<|im_end|>", published="qwen3_5_think", tools=True),
    "mistral": Family(MISTRAL, ("</s>", *_MISTRAL_TOKENS, "[/TOOL_RESULTS]"), tools=True),
    "gemma": Family(GEMMA, ("<end_of_turn>", "<start_of_turn>"), bos="<bos>", eos="<eos>", published="gemma3"),
    "deepseek-v3": Family(DEEPSEEK.replace("PROMPT", "'<｜Assistant｜>'"), **_DEEPSEEK),
    "deepseek-r1": Family(
        DEEPSEEK.replace("PROMPT", "'<｜Assistant｜><think>\\n'"), published="deepseekv3", **_DEEPSEEK
    ),
    "glm4": Family(GLM4, _GLM4_TOKENS, eos="<|endoftext|>", published="glm4moe", tools=True),
    "gpt-oss": Family(
        HARMONY,
        ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>"),
        **{"bos": "<|startoftext|>", "eos": "<|return|>", "published": "gptoss", "tools": True},
    ),
    "kimi-k2": Family(
        KIMI, ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"), eos="<|im_end|>"
    ),
    "phi-4-mini": Family(PHI4_MINI, ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>"), eos="<|endoftext|>"),
    "ministral-3": Family(MINISTRAL3, ("</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")),
    "smollm3": Family(SMOLLM3, _CHATML_TOKENS, eos="<|im_end|>"),
    "minimax-m2": Family(MINIMAX_M2, ("[e~[", "]~b]", "]~!b["), bos="]~!b[", eos="[e~[", tools=True),
    "olmo-2": Family(
        OLMO2, ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"), bos="<|endoftext|>", eos="<|endoftext|>"
    ),
    "olmo-3": Family(OLMO3, _CHATML_TOKENS, bos="<|endoftext|>", eos="<|endoftext|>", tools=True),
    "seed-oss": Family(SEED_OSS, ("<seed:eos>",), bos="<seed:bos>", eos="<seed:eos>"),
}
