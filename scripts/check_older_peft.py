"""Compares a folder of experts' factors in peft's older form (expert_files: before_peft_0.19) with the merged model.

peft up to 0.18.1 in an environment of its own, outside the tests, without the torchao of today, which it cannot import:

    pip install --no-deps --target /tmp/peft-0.18.1 peft==0.18.1
    PYTHONPATH=/tmp/peft-0.18.1 python scripts/check_older_peft.py BASE ADAPTER MERGED
"""

from __future__ import annotations

import sys

TOLERANCE = 1e-5


def main(base: str, adapter: str, merged: str) -> int:
    """Print the largest difference of logits; 0 if it is at most `TOLERANCE`."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    def logits(folder: str, adapter: str | None) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        ids = torch.arange(64)[None] % model.config.vocab_size
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, adapter)
        with torch.no_grad():
            return model(ids).logits

    original, expected = logits(base, None), logits(merged, None)
    difference = (logits(base, adapter) - expected).abs().max().item()
    print(
        f"peft {peft.__version__}: {difference:.2e} between the adapter and the merged model, "
        f"{(original - expected).abs().max().item():.2e} between the base and the merged model"
    )
    return 0 if difference <= TOLERANCE else 1


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: check_older_peft.py BASE ADAPTER MERGED")
    sys.exit(main(*sys.argv[1:]))
