"""Kimi K2: DeepSeek V3 under another model_type, which transformers does not have. An export says deepseek_v3, so that
it loads without the Python code of the original repository. (Moonlight's config.json says deepseek_v3 itself.)
"""

from dataclasses import replace

from megatron_wrap.bridge.families import deepseek_v3

FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="kimi_k2",
    exported_values={**deepseek_v3.FAMILY.exported_values, "model_type": "deepseek_v3"},
)
