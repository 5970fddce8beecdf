"""Distribution megatron-wrap. The tools' settings stand in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "megatron_wrap" / "__init__.py").read_text(), re.M).group(1)
README = HERE / "README.md"

# Each range begins at the lowest version that tests or GPU runs use, and ends before the next major (or, below 1.0 and
# where minor versions have broken something, minor) one that they do not.
REQUIREMENTS = [
    "torch>=2.11,<2.14",  # 2.11 on GPUs, 2.13 on CPUs
    # pip takes 0.16.1 below Python 3.12 and 0.19.2 from there; 0.17 and 0.18 were never run
    "megatron-core>=0.16.1,<0.20,!=0.17.*,!=0.18.*",
    "psutil>=7,<8",  # Megatron-Core's save needs it and does not ask for it
    "packaging>=24.2",
    "numpy>=2.4,<2.6",
    "einops>=0.8,<0.9",
    "pyyaml>=6.0,<7",
    "loguru>=0.7,<0.8",
    "wandb>=0.31,<1",
    "transformers>=5.17,<5.24",  # scripts/run_tests.sh --all runs the lowest, too
    "tokenizers>=0.23.1,<0.24",
    "safetensors>=0.8,<0.9",
    "datasets>=5.2,<6",
    "filelock>=3.12,<5",
    "argcomplete>=3.6,<4",
    "tqdm>=4.66,<5",
    "jinja2>=3.1,<4",  # chat templates of transformers
]
RAY = ["ray[train]==2.60.0"]
REMOTE = ["s3fs==2026.9.0", "gcsfs==2026.10.0"]
TENSORBOARD = ["tensorboard>=2.21,<3"]
PNG = ["matplotlib>=3.11,<4"]
QLORA = ["torchao>=0.18,<0.19"]
EVAL = ["lm_eval>=0.4.13,<0.5"]
EXTRAS = {
    "gpu": ["transformer-engine[pytorch]>=2.11,<2.21", "flash-attn", "liger-kernel>=0.8.5,<0.9"],
    # kernels of Qwen3-Next and Qwen3.5 on a GPU; tilelang has the one that Triton before 3.7.1 computes wrong on Hopper
    "linear-attention": ["fla-core>=0.6,<0.7", "tilelang==0.1.15"],
    "tensorboard": TENSORBOARD,
    "png": PNG,
    "qlora": QLORA,
    "eval": EVAL,
    "ray": RAY,
    "remote": REMOTE,  # hf:// needs nothing more: huggingface_hub comes with transformers
    "dev": [
        *(
            "pytest>=9.2,<10",
            "pytest-timeout>=2.4,<3",
            "pytest-xdist>=3.8,<4",
            "ruff>=0.17.5,<0.18",
            "mypy>=2.4.1,<2.5",
        ),
        *("types-PyYAML", "types-psutil", "trl>=1.16,<1.17", "peft>=0.21.2,<0.22", "jsonschema>=4.26,<5"),
        "confignest>=1.0.5,<1.1",  # the reference for the composition of YAML files
        *("s3fs==2026.9.0", "moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.5", "kubeflow-trainer-api==2.3.0"),
        *(*TENSORBOARD, *PNG, *QLORA, *EVAL, *RAY),
    ],
}

setup(
    name="megatron-wrap",
    version=VERSION,
    description="Write a training algorithm once, prove it on every parallel layout, run it on Megatron-Core.",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
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
        "megatron_wrap.bridge": ["measured_families.json", "export/model_card.md.jinja"],
        "megatron_wrap.cli": ["examples.txt", "templates/*"],
        "megatron_wrap.config.schema": ["*.yaml"],
        "megatron_wrap.launch": ["slurm_job.sh", "trainjob.yaml"],
        "megatron_wrap.report": ["templates/*"],
        "megatron_wrap.configs": ["schema.json", "nest/**/*.yaml", "nest/**/__confignest_manifest__"],
    },
    entry_points={"console_scripts": ["megatron-wrap = megatron_wrap.cli.main:main"]},
    zip_safe=False,
)
