import json
import struct
import time

import pytest
import wandb

from megatron_wrap.errors import ConfigError
from megatron_wrap.utils import wandb_logger
from megatron_wrap.utils.session import logger_session
from megatron_wrap.utils.wandb_logger import WandbLogger, has_key


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    """No API key, no login and no server: nothing listens on port 9."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb_logger, "INIT_TIMEOUT_SECONDS", 1)


def history(folder):
    """The steps of a closed offline run in `folder`; wandb's process writes them shortly after `close`."""
    deadline = time.monotonic() + 10
    while not (rows := read_history(folder)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return rows


def read_history(folder):
    """Parse wandb's records, which have LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    content, at, data, rows = path.read_bytes(), 7, b"", []  # 7: wandb's file header
    while at + 7 <= len(content):
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])  # checksum, length, whole/first/middle/last
        if kind == 0:  # the rest of a 32 KiB block
            at += -at % 32768
            continue
        data += content[at + 7 : at + 7 + length]
        at += 7 + length
        if 32768 - at % 32768 < 7:
            at += -at % 32768
        if kind in (2, 3):
            continue
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        data = b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


@pytest.mark.matrix
def test_run_without_a_key_is_recorded_offline(tmp_path):
    run = WandbLogger("project", "name", {"model": {"num_layers": 2}}, tmp_path / "out", rank=0)
    run.log(1, {"iteration": 1, "loss": 2.0})
    run.log(1, {"eval/validation/loss": 3.0})
    run.log(2, {"loss": 1.0})
    run.close()
    run.close()
    run.log(3, {"loss": 0.0})  # after close: ignored
    rows = history(tmp_path / "out")
    assert [row["_step"] for row in rows] == [1, 2]
    assert [row["loss"] for row in rows] == [2.0, 1.0]
    assert rows[0]["eval/validation/loss"] == 3.0


@pytest.mark.parametrize("resume_from", [pytest.param(None, marks=pytest.mark.matrix), 1])
def test_unreachable_server_logs_a_warning_and_records_offline(tmp_path, monkeypatch, capsys, resume_from):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with logger_session():
        run = WandbLogger("project", None, {}, tmp_path, resume_from=resume_from, rank=0)
    run.log(2, {"loss": 2.0})
    run.close()
    assert [row["loss"] for row in history(tmp_path)] == [2.0]
    shown = capsys.readouterr().err
    assert "WARNING wandb cannot go online" in shown
    assert "recorded offline; `wandb sync " in shown


def test_malformed_key_records_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    run = WandbLogger("project", None, {}, tmp_path, rank=0)
    run.log(1, {"loss": 2.0})
    run.close()
    assert [row["loss"] for row in history(tmp_path)] == [2.0]


def test_error_of_wandb_during_a_run_does_not_stop_training(tmp_path, monkeypatch):
    run = WandbLogger("project", None, {}, tmp_path, rank=0)

    def fail(*args, **kwargs):
        raise wandb.errors.Error("service died")

    monkeypatch.setattr(run._run, "log", fail)
    run.log(1, {"loss": 1.0})
    run.log(2, {"loss": 1.0})
    run.close()


def test_resumed_run_continues_the_wandb_run(tmp_path):
    ids = []
    for resume_from in (None, 3, None):
        run = WandbLogger("project", None, {}, tmp_path, resume_from=resume_from, rank=0)
        ids.append(run._run.id)
        run.close()
    assert ids[0] == ids[1] != ids[2]


def test_other_ranks_do_not_start_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    run = WandbLogger("project", None, {}, tmp_path / "out")
    run.log(1, {"loss": 1.0})
    run.close()
    assert not (tmp_path / "out").exists()


def test_key_is_found_in_the_environment_or_netrc(tmp_path, monkeypatch):
    assert not has_key()
    (tmp_path / "netrc").write_text("machine 127.0.0.1:9 login user password " + "b" * 40 + "\n")
    (tmp_path / "netrc").chmod(0o600)
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://elsewhere.example")
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "c" * 40)
    assert has_key()


def test_mode_never_requires_a_prompt(monkeypatch):
    modes = {"": "offline", "online": "offline", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
    for key, known in (("", modes), ("d" * 40, modes | {"": "online", "online": "online"})):
        monkeypatch.setenv("WANDB_API_KEY", key)
        for requested, mode in known.items():
            monkeypatch.setenv("WANDB_MODE", requested)
            assert wandb_logger._mode() == mode


def test_disabled_run_accepts_all_calls(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run = WandbLogger("project", None, {}, tmp_path, rank=0)
    run.log(1, {"loss": 1.0})
    run.close()


def test_run_that_cannot_be_recorded_is_a_config_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"file/out/wandb: .*Not a directory"):
        WandbLogger("project", None, {}, tmp_path / "file" / "out", rank=0)
    with pytest.raises(ConfigError, match=f"wandb .* {tmp_path}: "):
        WandbLogger("a/b", None, {}, tmp_path, rank=0)
    monkeypatch.setattr(wandb_logger.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="`pip install wandb`"):
        WandbLogger("project", None, {}, tmp_path, rank=0)
