"""Kimi K2: DeepSeek V3 under another model_type, which transformers does not have. Exports have the type deepseek_v3,
so that they load without the Python code of the original repository, as Moonlight's folders do.
"""

from dataclasses import replace

from megatron_wrap.bridge.families import deepseek_v3

FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="kimi_k2",
    exported_values=lambda arch: {**deepseek_v3.FAMILY.exported_values(arch), "model_type": "deepseek_v3"},
)
