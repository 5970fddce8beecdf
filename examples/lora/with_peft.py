"""Load an adapter with peft, and compare the model with the merged folder of the same run. Needs `pip install peft`,
which megatron-wrap itself does not.

python examples/lora/with_peft.py ADAPTER MERGED
"""

import sys

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = [{"role": "user", "content": "What does the function `len` do?"}]


def main(adapter: str, merged: str) -> None:
    """Print an answer of the base with the adapter, and the largest difference of logits from the merged model."""
    tokenizer = AutoTokenizer.from_pretrained(merged)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    base_folder = PeftConfig.from_pretrained(adapter).base_model_name_or_path
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, adapter)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        difference = (adapted(**prompt).logits - model(**prompt).logits).abs().max()
        answer = adapted.generate(**prompt, max_new_tokens=40, do_sample=False)
    print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"largest difference of logits from the merged model: {difference:.1e}")
    if difference > 1e-3:
        sys.exit("the two models differ; export both from the same checkpoint")


if __name__ == "__main__":
    main(*sys.argv[1:])
