"""LongRoPE against transformers: frequencies, the attention factor, and which factors a configuration selects."""

import pytest
import torch

from megatron_wrap.bridge.families.phi3 import FAMILY
from megatron_wrap.config.schema.derived import longrope_factors
from megatron_wrap.config.schema.model import ArchConfig

pytestmark = pytest.mark.transformers

ROPE = {
    **{"rope_type": "longrope", "rope_theta": 700.0, "partial_rotary_factor": 0.75},
    **{"short_factor": [1.0, 1.25, 2.0], "long_factor": [1.0, 3.0, 9.0], "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize(("length", "name"), [(16, "short_factor"), (17, "long_factor")])
def test_frequencies_and_the_attention_factor_are_those_of_transformers(length, name):
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    from megatron_wrap.nn.attention.self_attention import LongRotaryEmbedding

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": None}
    config = Phi3Config(**sizes, rope_parameters=ROPE, original_max_position_embeddings=16)
    theirs = Phi3RotaryEmbedding(config)
    theirs(torch.zeros(1), torch.arange(length)[None])  # selects the factors
    values = FAMILY.arch_values(config.to_dict())
    arch = ArchConfig(**{key: value for key, value in values.items() if key != "no_rope_freq"}, upstream={})
    factors = longrope_factors(arch, length)
    assert factors == ROPE[name]
    ours = LongRotaryEmbedding(8, 0.75, factors=factors, rotary_base=700.0, use_cpu_initialization=True)
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq)
    assert arch.longrope_attention_factor == pytest.approx(theirs.attention_scaling)
