"""Checkpoint folders: strict both ways, and everything that is wrong is named at once."""

import json

import pytest
import torch
from safetensors.torch import save_file

from foreglance.models.base import ModelError
from foreglance.models.weights import INDEX, SINGLE, Weights, find_model, heard_by, stored_bytes

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4), "c.bias": torch.zeros(1)}


def single(folder, tensors=None):
    save_file(tensors or TENSORS, folder / SINGLE)
    return folder


def sharded(folder, place=None):
    names = list(TENSORS)
    shards = {"one.safetensors": names[:1], "two.safetensors": names[1:]}
    for shard, inside in shards.items():
        save_file({name: TENSORS[name] for name in inside}, folder / shard)
    index = {name: shard for shard, inside in shards.items() for name in inside}
    (folder / INDEX).write_text(json.dumps({"weight_map": index | (place or {})}))
    return folder


@pytest.mark.parametrize("layout", (single, sharded))
def test_every_tensor_is_handed_out(layout, tmp_path):
    weights = Weights(layout(tmp_path))
    assert "a.weight" in weights and "nothing" not in weights
    assert torch.equal(weights.take("a.weight", 2, 3), TENSORS["a.weight"])
    assert {name: len(tensor) for name, tensor in weights.take_all("b.").items()} == {"weight": 4}
    assert list(weights.names("c.")) == ["c.bias"]
    weights.finish(lambda name: name == "c.bias")


def test_who_listens_hears_how_far_a_checkpoint_is_read_and_nobody_else_does(tmp_path):
    heard = []
    with heard_by(lambda name, done, of: heard.append((name, done, of))):
        weights = Weights(single(tmp_path))
        weights.take("a.weight", 2, 3)
        weights.take_all("b.")
        weights.finish(lambda name: name == "c.bias")
    Weights(tmp_path).take("a.weight", 2, 3)
    whole = stored_bytes(tmp_path)
    assert heard == [(tmp_path.name, done, whole) for done in (0, 24, whole)]


def test_missing_mis_shaped_and_left_over_tensors_are_named_all_at_once(tmp_path):
    weights = Weights(single(tmp_path))
    assert weights.take("a.weight", 3, 2).shape == (3, 2)
    assert weights.take("d.weight", 5).shape == (5,)
    assert weights.take("e.weight", 1, 1).shape == (1, 1)
    with pytest.raises(ModelError) as error:
        weights.finish()
    for words in (
        "2 missing: d.weight [5], e.weight [1, 1]",
        "1 mis-shaped: a.weight is [2, 3], expected [3, 2]",
        "2 left over: b.weight, c.bias",
        str(tmp_path),
    ):
        assert words in str(error.value)


def test_a_long_list_is_cut_and_counted(tmp_path):
    weights = Weights(single(tmp_path, {f"t{i:02}": torch.zeros(1) for i in range(20)}))
    with pytest.raises(ModelError, match=r"20 left over: t00, .*t11 and 8 more"):
        weights.finish()


def test_a_truncated_file_is_refused_by_name(tmp_path):
    path = single(tmp_path) / SINGLE
    whole = path.read_bytes()
    for length in (0, 4, 20, len(whole) - 5):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
            Weights(tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path):
    sharded(tmp_path, {"x": "three.safetensors"})
    with pytest.raises(ModelError, match=r"lacks the shards three\.safetensors"):
        Weights(tmp_path)


@pytest.mark.parametrize("name", ("../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors"))
def test_an_index_that_names_a_path_outside_is_refused(name, tmp_path):
    with pytest.raises(ModelError, match="names a shard outside its folder"):
        Weights(sharded(tmp_path, {"x": name}))


def test_a_folder_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match="only safetensors checkpoints are read"):
        Weights(tmp_path)


def test_a_model_that_is_nowhere_is_refused_in_words(tmp_path):
    for name in ("no-such-model", str(tmp_path / "nowhere"), "./nowhere/model", "a/b/c"):
        with pytest.raises(ModelError, match="neither an embedded model"):
            find_model(name)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == tmp_path
