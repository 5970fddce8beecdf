"""Secrets of ten kinds in the environment, in the YAML and on the command line: nothing that a run writes has them.

python scripts/drill/find_secrets.py --count 1 [--seed 0]

Each trial has new values, its own flow with options for them, and two runs of `megatron-wrap train`: one that trains,
saves and is reported as a page, and one whose flow raises an error with every value in its message. All files beside
the inputs and all output are searched for each value: checkpoints, the resolved configuration, run.json, metrics,
TensorBoard events, the page, failure.json and the console, plain, in base64 and with JSON's escapes. Python's own
traceback of the flow's error is the one exception: it is not written by the run.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import string
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml
from _counted import run

ROOT = Path(__file__).parents[2]
LETTERS = string.ascii_letters + string.digits
FLOW = """
from dataclasses import dataclass

from megatron_wrap.flow import MegatronWrapGPTModelSFTFlow


class SecretFlow(MegatronWrapGPTModelSFTFlow):
    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronWrapGPTModelSFTFlow.Config):
{fields}
        fails: bool = False

    def calculate_loss(self, loss_inputs, output):
        if self.flow_config.fails:
            import os

            secrets = [getattr(self.flow_config, name) for name in {names}]
            raise RuntimeError(f"401 for {{secrets}}, {{[os.environ[name] for name in {variables}]}}")
        return super().calculate_loss(loss_inputs, output)
"""


def text(generator: random.Random, length: int, letters: str = LETTERS) -> str:
    """Random characters."""
    return "".join(generator.choices(letters, k=length))


def kinds(generator: random.Random) -> dict[str, str]:
    """Ten secrets of different kinds: name of a key, in lower case -> value."""
    hexadecimal = string.hexdigits.lower()[:16]
    lines = "\n".join(text(generator, 64) for _ in range(3))
    return {
        "hf_token": f"hf_{text(generator, 34)}",
        "wandb_api_key": text(generator, 40, hexadecimal),
        "aws_secret_access_key": text(generator, 40),
        "github_token": f"ghp_{text(generator, 36)}",
        "judge_api_key": f"sk-proj-{text(generator, 40)}",
        "database_password": text(generator, 14, LETTERS + "!%&*+?"),
        "slack_token": f"xoxb-{text(generator, 12, string.digits)}-{text(generator, 24)}",
        "ssh_private_key": f"-----BEGIN OPENSSH PRIVATE KEY-----\n{lines}\n-----END OPENSSH PRIVATE KEY-----\n",
        "session_jwt": f"eyJhbGciOiJIUzI1NiJ9.{text(generator, 40)}.{text(generator, 43)}",
        "judge_url": f"https://trainer:{text(generator, 20)}@judge.example.com/v1",
    }


def parts(name: str, value: str) -> list[str]:
    """The parts of a secret that must not be found: the value; of a URL its password, of a key its lines."""
    if name == "judge_url":
        return [value.split(":")[2].split("@")[0]]
    return value.strip().split("\n")[1:-1] if "BEGIN" in value else [value]


def forms(part: str) -> list[bytes]:
    """The forms in which the part may be written."""
    encoded = [base64.b64encode(part.encode()), json.dumps(part)[1:-1].encode()]
    return [part.encode(), *encoded]


def train(folder: Path, overrides: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `megatron-wrap train`."""
    command = [sys.executable, "-m", "megatron_wrap.cli.main", "train", "run.yaml", *overrides]
    return _called(command, folder, environment)


def _called(command: list[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240, check=False
    )


def write_inputs(folder: Path, options: Mapping[str, str], variables: list[str]) -> None:
    """Write the run's YAML, its flow and its data."""
    content = yaml.safe_load((ROOT / "configs/tiny-llama-mock.yaml").read_text(encoding="utf-8"))
    content["megatron_lm"]["train"]["common"] |= {"train_iters": 4, "save": "out/checkpoints", "save_interval": 2}
    content["megatron_wrap"] = {
        "init": {"platform": "cpu"},
        "logger": {"output_dir": "out", "tensorboard_dir": "out/events"},
        "data": {"__select__": "jsonl", "__override__": {"train": "rows.jsonl"}},
        "flow": {"__select__": "custom", "__override__": {"flow_key": "secret_flow:SecretFlow", **options}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    fields = "\n".join(f'        {name}: str = ""' for name in [*options, "given_api_key", "note"])
    names = [*options, "given_api_key", "note"]
    (folder / "secret_flow.py").write_text(FLOW.format(fields=fields, names=names, variables=variables))
    rows = [json.dumps({"input_ids": list(range(n, n + 40)), "loss_mask": [1] * 40}) for n in range(32)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def drill(count: int, seed: int, scratch: Path) -> list[str]:
    """Places in which secrets of `count` trials were found."""
    wrong, searched = [], 0
    for index in range(count):
        generator = random.Random(f"{seed} {index}")
        folder = scratch / f"run{index}"
        folder.mkdir()
        variables = {name.upper(): value for name, value in kinds(generator).items()}
        options, typed = kinds(generator), kinds(generator)
        write_inputs(folder, options, list(variables))
        flow = "megatron_wrap.flow"
        overrides = [f"{flow}.given_api_key={typed['judge_api_key']}", f"{flow}.note={typed['github_token']}"]
        environment = {**variables, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
        outputs = {"console of the run": train(folder, overrides, environment)}
        report = [sys.executable, "-m", "megatron_wrap.cli.main", "report", "out"]
        outputs["console of the report"] = _called(report, folder, environment)
        failed = train(
            folder, [*overrides, f"{flow}.fails=true", "megatron_lm.train.common.save=out/failed"], environment
        )
        wrong += [f"{name}: exit code {done.returncode}" for name, done in outputs.items() if done.returncode]
        if failed.returncode == 0 or not (folder / "out/failure.json").is_file():
            wrong.append(f"the run that had to fail: exit code {failed.returncode}, {failed.stderr[-1500:]}")
        contents = {name: (done.stdout + done.stderr).encode() for name, done in outputs.items()}
        contents["last line of the failed run"] = failed.stderr.strip().split("\n")[-1].encode()
        for path in sorted((folder / "out").rglob("*")):
            if path.is_file():
                data = path.read_bytes()
                contents[str(path.relative_to(folder))] = gzip.decompress(data) if path.suffix == ".gz" else data
        secrets = [("environment", *item) for item in variables.items()] + [("YAML", *item) for item in options.items()]
        secrets += [("command line", name, typed[name]) for name in ("judge_api_key", "github_token")]
        searched += len(contents)
        for origin, name, value in secrets:
            for part in parts(name.lower(), value):
                outputs_with_secret = [
                    output for output, data in contents.items() if any(form in data for form in forms(part))
                ]
                wrong += [f"{name} of the {origin} is in {output}" for output in outputs_with_secret]
    print(f"{count} trials, 22 secrets each, {searched} files and outputs searched: {len(wrong)} found")
    return wrong


if __name__ == "__main__":
    sys.exit(run(drill, __doc__ or "", 1, "trials with new secrets"))
