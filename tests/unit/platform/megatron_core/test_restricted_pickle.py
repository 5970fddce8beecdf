"""What a pickle of a checkpoint may create, and what it may not change."""

import collections
import io
import os
import pathlib
import pickle
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from megatron_wrap.errors import CheckpointError
from megatron_wrap.platform.megatron_core import restricted_pickle
from megatron_wrap.platform.megatron_core.checkpoint_reader import load_common, read_metadata

STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"


class Call:
    """Calls a function when it is unpickled; `state` is then set on the result."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class Change:
    """Sets attributes of an object that a pickle refers to by its name."""

    def __init__(self, module: str, name: str, attributes: dict[str, Any]) -> None:
        self.module, self.name, self.attributes = module, name, attributes

    def content(self) -> bytes:
        target = f"c{self.module}\n{self.name}\n".encode()
        values = pickle.dumps((None, self.attributes), protocol=2)[2:-1]
        return b"\x80\x02" + target + values + b"b."


def metadata(**fields: Any) -> Metadata:
    index = MetadataIndex("weight", torch.Size([0]))
    tensor = TensorStorageMetadata(
        TensorProperties(torch.bfloat16),
        torch.Size([2]),
        [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))],
    )
    values = {
        "state_dict_metadata": {"weight": tensor, "object": BytesStorageMetadata()},
        "planner_data": {"weight": ("weight",)},
        "storage_data": {index: _StorageInfo("__0_0.distcp", 0, 8)},
        "storage_meta": StorageMeta(checkpoint_id=Path("folder"), save_id="id", load_id=None),
    }
    return Metadata(**{**values, **fields})


def written(folder: Path, content: Any) -> Path:
    file = folder / ".metadata"
    file.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return file


def test_what_torch_writes_is_read(tmp_path: Path):
    expected = metadata()
    expected.all_local_plans = [SavePlan([WriteItem(MetadataIndex("weight"), WriteItemType.TENSOR)])]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        actual = read_metadata(written(tmp_path, pickle.dumps(expected, protocol=protocol)))
        assert actual == expected
        assert actual.all_local_plans == expected.all_local_plans


def test_metadata_of_older_versions_of_megatron_core_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    @dataclass
    class MCoreMetadata(Metadata):
        mcore_data: dict[str, Any] = field(default_factory=dict)

    @dataclass(frozen=True)
    class MCoreSavePlan(SavePlan):
        mcore_data: dict[str, Any] = field(default_factory=dict)

    module = types.ModuleType(STRATEGIES)
    for owner in (MCoreMetadata, MCoreSavePlan):
        owner.__module__, owner.__qualname__ = STRATEGIES, owner.__name__
        setattr(module, owner.__name__, owner)
    monkeypatch.setitem(sys.modules, STRATEGIES, module)
    older = MCoreMetadata(**vars(metadata()), mcore_data={"weight": {"shape": (2,)}})
    older.all_local_plans = [MCoreSavePlan([], mcore_data={"weight": {}})]
    actual: Any = read_metadata(written(tmp_path, older))
    assert actual == metadata()
    assert actual.mcore_data == {"weight": {"shape": (2,)}}
    assert actual.all_local_plans[0].mcore_data == {"weight": {}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (metadata(planner_data=Call(os.mkdir, "marker")), r"posix\.mkdir"),
        (metadata(planner_data=Call(getattr, pathlib.Path("a"), "mkdir")), "reads the attribute mkdir"),
        (metadata(planner_data=Call(getattr, Metadata, "__init__")), "reads the attribute __init__"),
        (metadata(planner_data=Call(torch.load, "file")), r"torch\.serialization\.load|torch\.load"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04exit\x85R.", r"os\.system"),
        (b"\x80\x04\x8c\x05torch\x8c\x0cos.path.join\x93.", r"torch\.os\.path\.join"),
        (b"\x80\x04\x8c\x05torch\x8c\x02os\x93.", r"torch\.os"),
    ],
)
def test_nothing_else_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, words: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=rf"\.metadata is refused: it .*({words})"):
        read_metadata(written(tmp_path, content))
    assert not Path("marker").exists()


@pytest.mark.parametrize(
    "change",
    [
        Change("pathlib", "PosixPath", {"resolve": pathlib.PosixPath, "is_file": pathlib.PosixPath}),
        Change("torch.distributed.checkpoint.filesystem", "_StorageInfo", {"relative_path": "x"}),
        Change("torch.distributed.checkpoint.planner", "WriteItemType", {"further": 1}),
        Change("builtins", "getattr", {"__kwdefaults__": {"name": "x"}}),
        Change("torch.serialization", "_get_layout", {"__defaults__": ("x",)}),
    ],
)
def test_a_pickle_changes_nothing_that_it_refers_to(tmp_path: Path, change: Change):
    owners = (pathlib.PosixPath, _StorageInfo, WriteItemType, restricted_pickle.enum_member)
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(CheckpointError, match=r"\.metadata (is refused: it asks for a change of|cannot be read)"):
        read_metadata(written(tmp_path, change.content()))
    assert [dict(vars(owner)) for owner in owners] == before
    assert restricted_pickle.enum_member.__kwdefaults__ is None
    assert torch.serialization._get_layout.__defaults__ is None


def test_a_pickle_changes_no_member_of_an_enumeration(tmp_path: Path):
    member = metadata(planner_data=Call(WriteItemType, WriteItemType.TENSOR.value, state={"_value_": 7}))
    with pytest.raises(CheckpointError, match=r"is refused: it asks for a change of .*TENSOR"):
        read_metadata(written(tmp_path, member))
    assert WriteItemType(WriteItemType.TENSOR.value) is WriteItemType.TENSOR
    assert WriteItemType.TENSOR.value != 7


class Named(collections.OrderedDict[Any, Any]):
    """A dictionary whose values are hidden from those who ask for them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return collections.OrderedDict, (), {"values": set}, None, iter(self.items())


class ShownAsAnother:
    """A path that is shown as another one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pathlib.PosixPath, ("/etc/passwd",), (None, {"_str": "__0_0.distcp"})


def test_the_name_of_a_file_is_a_string_of_a_dictionary(tmp_path: Path):
    (index,) = metadata().storage_data
    hidden = Named({index: _StorageInfo("../elsewhere", 0, 8)})
    shown_as_another = {index: _StorageInfo(ShownAsAnother(), 0, 8)}  # type: ignore[arg-type]
    for stored in (hidden, shown_as_another, {index: metadata()}, None):
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: its storage_data is not a dictionary"):
            read_metadata(written(tmp_path, metadata(storage_data=stored)))
    for name in ("../elsewhere", "/etc/passwd", "a\0b"):
        with pytest.raises(CheckpointError, match="outside its folder"):
            read_metadata(written(tmp_path, metadata(storage_data={index: _StorageInfo(name, 0, 8)})))


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "__0_0.distcp")
    os.mkfifo(tmp_path / "common.pt")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: is a pipe"):
        read_metadata(written(tmp_path, metadata()))
    with pytest.raises(CheckpointError, match=r"common\.pt: is a pipe"):
        load_common(tmp_path)


def test_damage_is_one_error(tmp_path: Path):
    content = pickle.dumps(metadata())
    for size in range(0, len(content), 7):
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: .*; restore it"):
            read_metadata(written(tmp_path, content[:size]))


def test_torch_load_refuses_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.chdir(tmp_path)
    written_by_torch = io.BytesIO()
    torch.save([Call(os.mkdir, "marker")], written_by_torch)
    written_by_torch.seek(0)
    with (
        pytest.raises(CheckpointError, match=r"file is refused: it refers to posix\.mkdir"),
        restricted_pickle.refusing("file"),
    ):
        restricted_pickle.torch_load(written_by_torch)
    assert not Path("marker").exists()
