import collections
import dataclasses
import json
import logging
import os
import resource
import shutil
import stat

import pytest
import torch
from safetensors.torch import load_file

from draftgraph.model_zoo.errors import TrainingDataError
from draftgraph.model_zoo.training import shards as shards_module
from draftgraph.model_zoo.training.fingerprint import fingerprint
from draftgraph.model_zoo.training.shard_files import write_shard
from draftgraph.model_zoo.training.shards import MANIFEST_NAME, ShardStore, StateIdentity

COUNT = 7
IDENTITY = StateIdentity(
    target="tiny", layers=(1, 3), hidden_size=5, dtype="bfloat16", examples="examples", count=COUNT
)


def example(index):
    """States of `index + 2` tokens, so that odd sizes occur."""
    length = index + 2
    fill = torch.Generator().manual_seed(index)
    return (
        torch.arange(length) + 100 * index,
        torch.randn(length, 10, generator=fill),
        torch.randn(length, 5, generator=fill),
    )


def fill(store, indices):
    for index in indices:
        store.add(index, *example(index))


def check(store, indices):
    for index in indices:
        found = store.read(index)
        tokens, states, final = example(index)
        dtype = store.identity.torch_dtype
        torch.testing.assert_close(found.tokens, tokens, rtol=0, atol=0)
        torch.testing.assert_close(found.states, states.to(dtype), rtol=0, atol=0)
        torch.testing.assert_close(found.final, final.to(dtype), rtol=0, atol=0)


def shards(directory):
    return sorted(directory.glob("states-*"))


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "states"


@pytest.fixture
def two_shards(directory):
    """Examples 0 to 2 in one shard, 5 and 4 in another."""
    store = ShardStore(directory, IDENTITY)
    for indices in ((2, 0, 1), (5, 4)):
        fill(store, indices)
        store.flush()
    return directory


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_written_is_read_in_any_order(directory, dtype):
    identity = dataclasses.replace(IDENTITY, dtype=dtype)
    store = ShardStore(directory, identity, shard_bytes=150)
    order = [3, 0, 6, 1, 5, 2, 4]
    fill(store, order)
    check(store, range(COUNT))  # some of them are in memory still
    store.flush()
    store.close()
    assert len(shards(directory)) > 2
    again = ShardStore(directory, identity)
    assert again.missing() == []
    assert len(again) == COUNT
    check(again, order)
    total = sum(file.stat().st_size for file in shards(directory))
    assert total <= again.bytes_needed(index + 2 for index in range(COUNT))


def test_files_are_ordinary_safetensors(two_shards):
    tensors = load_file(shards(two_shards)[0])
    assert sorted(tensors) == sorted(f"{part}.{index}" for part in ("tokens", "states", "final") for index in range(3))
    assert tensors["states.1"].tolist() == example(1)[1].bfloat16().tolist()


def test_heads_that_read_the_last_hidden_state_alone(directory):
    identity = dataclasses.replace(IDENTITY, layers=())
    store = ShardStore(directory, identity)
    for index in range(COUNT):
        tokens, states, final = example(index)
        store.add(index, tokens, states[:, :0], final)
    store.flush()
    again = ShardStore(directory, identity)
    assert again.missing() == []
    assert again.read(2).states.shape == (4, 0)
    torch.testing.assert_close(again.read(2).final, example(2)[2].bfloat16(), rtol=0, atol=0)


def test_it_goes_on_where_it_stopped(two_shards):
    before = [file.stat().st_mtime_ns for file in shards(two_shards)]
    store = ShardStore(two_shards, IDENTITY)
    assert store.missing() == [3, 6]
    assert 5 in store
    assert 6 not in store
    fill(store, range(COUNT))
    store.flush()
    assert ShardStore(two_shards, IDENTITY).missing() == []
    assert len(shards(two_shards)) == 3
    assert [file.stat().st_mtime_ns for file in (shards(two_shards)[0], shards(two_shards)[2])] == before


def test_two_processes_fill_one_directory(directory):
    one, other = (ShardStore(directory, IDENTITY, rank=rank) for rank in range(2))
    fill(one, range(0, COUNT, 2))
    fill(other, range(1, COUNT, 2))
    one.flush()
    other.flush()
    assert one.missing() == [1, 3, 5]
    one.refresh()
    check(one, range(COUNT))


def damage_tail(file):
    file.write_bytes(file.read_bytes()[:-1])


def damage_header(file):
    data = bytearray(file.read_bytes())
    data[0:8] = (10**6).to_bytes(8, "little")
    file.write_bytes(data)


def damage_type(file):
    file.write_bytes(file.read_bytes().replace(b"BF16", b"F16 ").replace(b'"F16 "', b' "F16"'))


def damage_name(file):
    file.write_bytes(file.read_bytes().replace(b"states.1", b"states.9"))


@pytest.mark.parametrize("damage", [damage_tail, damage_header, damage_type, damage_name])
def test_a_damaged_shard_is_not_used_and_written_anew(two_shards, damage, caplog):
    damage(shards(two_shards)[0])
    with caplog.at_level(logging.WARNING):
        store = ShardStore(two_shards, IDENTITY)
    assert "is damaged" in caplog.text
    assert store.missing() == [0, 1, 2, 3, 6]
    fill(store, store.missing())
    store.flush()
    again = ShardStore(two_shards, IDENTITY)
    assert again.missing() == []
    check(again, range(COUNT))


def test_a_byte_that_changed_is_seen(two_shards):
    store = ShardStore(two_shards, IDENTITY)
    stored = store.read(0)
    file = next(file for file in shards(two_shards) if "states.0" in load_file(file))
    content = bytearray(file.read_bytes())
    content[content.index(stored.states.view(torch.uint8).numpy().tobytes()) + 3] ^= 0x10
    file.write_bytes(content)
    with pytest.raises(TrainingDataError, match=r"is damaged: the hidden states of example 0 have another checksum"):
        ShardStore(two_shards, IDENTITY).read(0)


def test_what_a_killed_writer_left_is_removed(two_shards):
    (two_shards / ".writing-0-abc").write_bytes(b"half")
    (two_shards / ".writing-1-abc").write_bytes(b"of another process that may be alive")
    assert ShardStore(two_shards, IDENTITY).missing() == [3, 6]
    assert sorted(file.name for file in two_shards.glob(".*")) == [".writing-1-abc"]


def test_a_run_that_begins_meanwhile_loses_nothing_of_another(two_shards, monkeypatch):
    """It takes what the other is writing for what a killed one left."""
    store = ShardStore(two_shards, IDENTITY)
    fill(store, [3, 6])
    begun = []

    def write(place, tensors, metadata):
        write_shard(place, tensors, metadata)
        if not begun:
            begun.append(ShardStore(two_shards, IDENTITY))
            assert not place.exists()

    monkeypatch.setattr(shards_module, "write_shard", write)
    store.flush()
    check(ShardStore(two_shards, IDENTITY), range(COUNT))


def test_a_directory_that_vanishes(two_shards):
    store = ShardStore(two_shards, IDENTITY)
    fill(store, [3])
    shutil.rmtree(two_shards)
    with pytest.raises(TrainingDataError, match="can be used no more: No such file"):
        store.flush()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (1, 2)}, r"layers \[1, 3\] there and \[1, 2\] here"),
        ({"dtype": "float32"}, 'dtype "bfloat16" there and "float32" here'),
        ({"target": "other", "count": 9}, 'count 7 there and 9 here; target "tiny" there and "other" here'),
        ({"examples": "x"}, 'examples "examples" there and "x" here'),
    ],
)
def test_states_of_something_else_are_refused(two_shards, change, message):
    with pytest.raises(TrainingDataError, match=message):
        ShardStore(two_shards, dataclasses.replace(IDENTITY, **change))


def test_shards_of_another_identity_are_passed_over(two_shards):
    other = dataclasses.replace(IDENTITY, target="other")
    (two_shards / MANIFEST_NAME).write_text(json.dumps(other.to_json()))
    assert ShardStore(two_shards, other).missing() == list(range(COUNT))


def test_a_damaged_manifest(two_shards):
    (two_shards / MANIFEST_NAME).write_text("{")
    with pytest.raises(TrainingDataError, match=r"not valid JSON.*remove .*, or name another directory"):
        ShardStore(two_shards, IDENTITY)


def test_a_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingDataError, match=r"cannot be kept in .*file/states"):
        ShardStore(tmp_path / "file" / "states", IDENTITY)


def test_room_is_asked_for_before(directory, monkeypatch):
    store = ShardStore(directory, IDENTITY)
    store.require_room([2, 3])
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 999, 999))
    with pytest.raises(TrainingDataError, match=r"need 38\d\d\d bytes .* and 999 .* are free: make room"):
        store.require_room([1000])
    fill(store, range(COUNT))
    with pytest.raises(TrainingDataError, match=r"and 999 .* are free"):
        store.flush()
    assert shards(directory) == []
    monkeypatch.undo()
    store.flush()
    check(ShardStore(directory, IDENTITY), range(COUNT))


def test_others_can_read_a_shard(directory):
    mask = os.umask(0o022)
    try:
        store = ShardStore(directory, IDENTITY)
        fill(store, range(COUNT))
        store.flush()
    finally:
        os.umask(mask)
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o644}


def test_a_disk_that_fills_up_while_a_shard_is_written(two_shards):
    store = ShardStore(two_shards, IDENTITY)
    fill(store, [3, 6])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(TrainingDataError, match=r"could not be written: .*; it needs \d+ bytes, and \d+ are free"):
            store.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(file.name for file in two_shards.iterdir()) == sorted(
        [MANIFEST_NAME, *(file.name for file in shards(two_shards))]
    )
    assert ShardStore(two_shards, IDENTITY).missing() == [3, 6]
    store.flush()  # room again
    check(ShardStore(two_shards, IDENTITY), range(COUNT))


def test_what_is_not_taken(directory):
    store = ShardStore(directory, IDENTITY)
    tokens, states, final = example(1)
    with pytest.raises(TrainingDataError, match="there are 7 examples; 7 is none of them"):
        store.add(7, tokens, states, final)
    with pytest.raises(TrainingDataError, match=r"must have the shapes .*\(3, 10\).* they have .*\(2, 10\)"):
        store.add(1, tokens, states[:2], final)
    with pytest.raises(TrainingDataError, match="example 1 are not all finite"):
        store.add(1, tokens, states / 0, final)
    with pytest.raises(TrainingDataError, match="does not hold the hidden states of example 1"):
        store.read(1)


def test_a_shard_that_vanishes(two_shards):
    store = ShardStore(two_shards, IDENTITY)
    shards(two_shards)[0].unlink()
    with pytest.raises(TrainingDataError, match="cannot be read any more"):
        store.read(1)


@pytest.mark.parametrize(
    ("change", "message"), [({"dtype": "int8"}, "bfloat16 or float32, got 'int8'"), ({"count": 0}, "0 examples")]
)
def test_identities_that_are_refused(change, message):
    with pytest.raises(TrainingDataError, match=message):
        dataclasses.replace(IDENTITY, **change)


def test_fingerprints_tell_weights_apart(tmp_path):
    def model(name, weights, config="{}"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(weights)
        (directory / "config.json").write_text(config)
        return fingerprint(directory)

    weights = bytes(range(256)) * 400
    same = model("a", weights)
    assert model("b", weights) == same
    assert model("c", weights[:-1] + b"!") != same
    assert model("d", b"!" + weights[1:]) != same
    assert model("e", weights, '{"a": 1}') != same
    assert model("f", weights + b"!") != same
