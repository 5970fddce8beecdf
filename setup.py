"""Distribution megatron-wrap. The tools' settings stand in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "megatron_wrap" / "__init__.py").read_text(), re.M).group(1)
README = HERE / "README.md"

REQUIREMENTS = [
    "torch>=2.10",
    # pip takes 0.16.1 below Python 3.12 and 0.19.2 from there; 0.17 and 0.18 were never run
    "megatron-core>=0.16.1,<0.20,!=0.17.*,!=0.18.*",
    "psutil",  # Megatron-Core's save needs it and does not ask for it
    "packaging",
    "numpy",
    "einops",
    "confignest>=1.0.5",
    "pyyaml>=6.0",
    "loguru>=0.7",
    "wandb",
    "transformers>=5",
    "tokenizers",
    "safetensors",
    "datasets>=5.2",
    "filelock>=3.12",
    "jinja2",  # chat templates of transformers
]
RAY = ["ray[train]==2.60.0"]
REMOTE = ["s3fs==2026.9.0", "gcsfs==2026.10.0"]
EXTRAS = {
    "gpu": ["transformer-engine[pytorch]", "flash-attn", "liger-kernel>=0.8.5,<0.9"],
    # kernels of Qwen3-Next and Qwen3.5 on a GPU; tilelang has the one that Triton before 3.7.1 computes wrong on Hopper
    "linear-attention": ["fla-core>=0.6,<0.7", "tilelang==0.1.15"],
    "tensorboard": ["tensorboard"],
    "png": ["matplotlib"],
    "qlora": ["torchao>=0.18,<0.19"],
    "eval": ["lm_eval>=0.4.13,<0.5"],
    "ray": RAY,
    "remote": REMOTE,  # hf:// needs nothing more: huggingface_hub comes with transformers
    "dev": [
        *("pytest>=8", "pytest-timeout", "pytest-xdist", "trl", "ruff", "mypy", "types-PyYAML", "types-psutil"),
        *("tensorboard", "matplotlib", "lm_eval>=0.4.13,<0.5", "jsonschema", "torchao>=0.18,<0.19"),
        *("s3fs==2026.9.0", "moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.5", "kubeflow-trainer-api==2.3.0"),
        *RAY,
    ],
}

setup(
    name="megatron-wrap",
    version=VERSION,
    description="Write a training algorithm once, prove it on every parallel layout, run it on Megatron-Core.",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    packages=[
        *find_packages(include=["megatron_wrap", "megatron_wrap.*"]),
        "megatron_wrap.configs",
        "megatron_wrap.examples",
    ],
    # configs/nest and examples/train.py of the checkout are below megatron_wrap/ in the installed package
    package_dir={"megatron_wrap.configs": "configs", "megatron_wrap.examples": "examples"},
    package_data={
        "megatron_wrap": ["py.typed"],
        "megatron_wrap.bridge": ["measured_families.json"],
        "megatron_wrap.cli": ["examples.txt", "templates/*"],
        "megatron_wrap.config.schema": ["*.yaml"],
        "megatron_wrap.launch.slurm": ["job.sh"],
        "megatron_wrap.report": ["*.css", "*.js"],
        "megatron_wrap.configs": ["schema.json", "nest/**/*.yaml", "nest/**/__confignest_manifest__"],
    },
    entry_points={"console_scripts": ["megatron-wrap = megatron_wrap.cli.main:main"]},
    zip_safe=False,
)
