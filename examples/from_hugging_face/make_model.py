"""A small random Llama with the sample data's tokenizer, saved by transformers: stands in for a model of the hub.

python examples/from_hugging_face/make_model.py [FOLDER [TOKENIZER]]
"""

import sys

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main(folder: str = "outputs/tiny-hf", tokenizer_folder: str = "examples/data/generated/tokenizer") -> None:
    """Write config.json, random fp32 weights and the tokenizer into `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
